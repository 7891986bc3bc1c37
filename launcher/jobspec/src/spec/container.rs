//! `run.container`: the container in which each worker of a program runs.
use crate::keys::{
    choice::{choice_type, choices},
    collections::described_list_type,
    key::Key,
    section::section,
    text::{formatted_text_type, verbatim_text_type},
    value_type::ValueType,
};
use serde::{Deserialize, Serialize};

section! {
    /// The container in which each worker of a program runs.
    #[derive(Default)]
    pub struct ContainerSpec at "";
    /// The image: a file, a directory or a name, as the runtime takes it.
    pub image: String = Key::required(image_type());
    /// The program that starts the container.
    pub runtime: ContainerRuntime = Key::required(choice_type());
    /// The directories of the host that the container sees, in addition to the working directory
    /// and the run directory.
    pub mounts: Vec<ContainerMount> = Key::new(
        described_list_type("list of `/source[:/target][:ro]`", "a list of mounts such as \"/data:/mnt:ro\"", mount_type()),
        "[]",
    );
    /// Further options for the runtime, which precede the image.
    pub options: Vec<String> =
        Key::new(described_list_type("list of text", "a list of options of the runtime", verbatim_text_type()), "[]");
}

choices! {
    /// `run.container.runtime`: the program that starts the container of a worker.
    #[derive(Default)]
    pub enum ContainerRuntime {
        /// `apptainer exec`. The image is a file, a directory or an address.
        Apptainer = "apptainer" is default,
        /// `enroot start`. The image is a squashfs file or the name of a container.
        Enroot = "enroot",
        /// `podman run`.
        Podman = "podman",
        /// `docker run`.
        Docker = "docker",
        /// `ch-run`. The image is a directory, a squashfs file or a name.
        Charliecloud = "charliecloud",
    }
}

impl ContainerRuntime {
    /// Returns the name of the executable of the container runtime, such as `docker`.
    pub fn program(self) -> &'static str {
        match self {
            ContainerRuntime::Apptainer => "apptainer",
            ContainerRuntime::Enroot => "enroot",
            ContainerRuntime::Podman => "podman",
            ContainerRuntime::Docker => "docker",
            ContainerRuntime::Charliecloud => "ch-run",
        }
    }
}

/// A directory or file of the host that is visible in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerMount {
    /// The absolute path on the host.
    pub source: String,
    /// The absolute path in the container.
    pub target: String,
    /// Whether processes in the container cannot write to it.
    pub read_only: bool,
}

impl ContainerMount {
    /// Parses a mount such as `/data`, `/data:/mnt` or `/data:/mnt:ro`. Returns `None` for another
    /// text. Runtimes use colons and commas as separators, so paths cannot contain these.
    fn parse(text: &str) -> Option<ContainerMount> {
        let (paths, read_only) = match text.strip_suffix(":ro") {
            Some(paths) => (paths, true),
            None => (text, false),
        };
        let (source, target) = paths.split_once(':').unwrap_or((paths, paths));
        let fits = |path: &str| path.starts_with('/') && !path.contains([':', ',']);
        let (source, target) = (source.to_owned(), target.to_owned());
        (fits(&source) && fits(&target)).then_some(ContainerMount { source, target, read_only })
    }

    /// Formats the mount as in a job file, such as `/data:/mnt:ro`.
    pub fn format(&self) -> String {
        let target = if self.target == self.source { String::new() } else { format!(":{}", self.target) };
        format!("{}{target}{}", self.source, if self.read_only { ":ro" } else { "" })
    }
}

/// Returns the parser and printer ([`ValueType`]) for an item of `run.container.mounts`, such as
/// `/data:/mnt:ro`.
fn mount_type() -> ValueType<ContainerMount> {
    let expected = "absolute paths such as \"/data\" or \"/data:/mnt:ro\", without commas";
    formatted_text_type("mount", expected, "^/[^:,]*(:/[^:,]*)?(:ro)?$", |text| {
        ContainerMount::parse(text).is_some()
    })
    .convert(
        |text| ContainerMount::parse(&text).unwrap_or_else(|| unreachable!("the format was checked")),
        |mount| Some(mount.format()),
    )
}

/// Returns the parser and printer ([`ValueType`]) for `run.container.image`: the image of a
/// container, as a name or path. An image cannot look like an option.
fn image_type() -> ValueType<String> {
    formatted_text_type(
        "text",
        "a path or name of an image, which does not begin with `-`",
        "^[^-]",
        |image| !image.starts_with('-'),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{JobSource, load_job};

    /// Loads a job with this value of `run.container`.
    fn load_container(value: &str) -> Result<ContainerSpec, diagnostic::Code> {
        let text = format!("run: {{command: [a], container: {value}}}");
        let loaded = load_job(JobSource::Text { name: "a.yaml".to_owned(), text }, &[]);
        let job = loaded.map_err(|errors| errors[0].code())?.0;
        let printed = crate::list_key_values(&job)["run.container"].clone();
        let container = job.run.container.expect("a container");
        let text = format!("run: {{command: [a], container: {printed}}}");
        let again = load_job(JobSource::Text { name: "a.yaml".to_owned(), text }, &[]).expect(&printed).0;
        assert_eq!(again.run.container.as_ref(), Some(&container), "{printed}");
        Ok(container)
    }

    #[test]
    fn containers_are_read_and_printed() {
        let container = load_container(
            "{image: /images/a.sif, runtime: apptainer, mounts: [/data, '/a b:/mnt:ro'], options: [--cleanenv, 3]}",
        )
        .expect("a container");
        assert_eq!(container.runtime, ContainerRuntime::Apptainer);
        assert_eq!(container.options, ["--cleanenv", "3"]);
        let mount = |source: &str, target: &str, read_only| ContainerMount {
            source: source.to_owned(),
            target: target.to_owned(),
            read_only,
        };
        assert_eq!(container.mounts, [mount("/data", "/data", false), mount("/a b", "/mnt", true)]);
        let minimal = load_container("{image: 'a/b:1', runtime: docker}").expect("a container");
        assert_eq!((minimal.mounts.len(), minimal.options.len()), (0, 0));
    }

    #[test]
    fn wrong_containers_are_rejected() {
        use diagnostic::codes::job as codes;
        for (value, code) in [
            ("a.sif", codes::JOB_VALUE_TYPE),
            ("{image: a.sif}", codes::JOB_KEY_REQUIRED),
            ("{runtime: podman}", codes::JOB_KEY_REQUIRED),
            ("{image: a, runtime: lxc}", codes::JOB_VALUE_UNKNOWN),
            ("{image: --privileged, runtime: podman}", codes::JOB_VALUE_FORMAT),
            ("{image: a, runtime: podman, mounts: [data]}", codes::JOB_VALUE_FORMAT),
            ("{image: a, runtime: podman, mounts: ['/a:/b:/c']}", codes::JOB_VALUE_FORMAT),
            ("{image: a, runtime: podman, mounts: ['/a,b']}", codes::JOB_VALUE_FORMAT),
            ("{image: a, runtime: podman, volumes: []}", codes::JOB_KEY_UNKNOWN),
        ] {
            assert_eq!(load_container(value).map(|_| ()), Err(code), "{value}");
        }
    }
}
