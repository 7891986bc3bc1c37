//! [`resolve_hosts`]: determines the hosts of a job from `cluster.hosts` and the filters `include`
//! and `exclude`.
use diagnostic::{Diagnostic, codes::job as codes};
use jobspec::{
    ClusterSpec, HostSelection,
    hosts::{
        HostAddress, HostSlots, HostfileEntry, HostfileError, MAX_HOSTFILE_BYTES, MAX_HOSTS, filter_hosts,
        parse_hostfile, parse_hosts,
    },
    read_input_file,
};
use std::path::Path;

/// A host that `cluster.hosts` or a hostfile names, with its slots (places for workers).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterHost {
    /// The address of the host for SSH.
    pub(crate) host: HostAddress,
    /// The slots that the hostfile states and the filters select.
    pub(crate) slots: HostSlots,
}

/// The largest number of errors in one hostfile that are reported to the user.
const MAX_REPORTED_ERRORS: usize = 5;

/// Returns the hosts in `cluster.hosts` that the filters `cluster.include` and `cluster.exclude`
/// select, in the order of `cluster.hosts`. Returns `None` if the job names no hosts. Fails if a
/// job that names no hosts has filters. The path of a hostfile is relative to `base`.
pub(crate) fn resolve_hosts(
    cluster: &ClusterSpec,
    base: &Path,
) -> Result<Option<Vec<ClusterHost>>, Vec<Diagnostic>> {
    let named = match &cluster.hosts {
        HostSelection::List(texts) => parse_host_list(texts)?,
        HostSelection::File(file) => {
            let file = base.join(file);
            let text = read_hostfile(&file)
                .map_err(|error| vec![error.with_help("the path is relative to `run.workdir`")])?;
            parse_hostfile_entries(&file, &text)?
        }
        _ if cluster.include.is_empty() && cluster.exclude.is_empty() => return Ok(None),
        _ => {
            let key = if cluster.include.is_empty() { "cluster.exclude" } else { "cluster.include" };
            let message = format!("`{key}` filters the hosts of `cluster.hosts`, which names none");
            return Err(vec![
                Diagnostic::error(codes::JOB_HOST_FILTER_INVALID, message)
                    .with_subject(key)
                    .with_help("remove the filter, or name the hosts"),
            ]);
        }
    };
    apply_filters(cluster, &named).map(Some)
}

/// Parses the text of a hostfile, and returns those of its hosts that the filters `include` and
/// `exclude` select. Messages name the path `file`.
pub(crate) fn resolve_hostfile_text(
    cluster: &ClusterSpec,
    file: &Path,
    text: &str,
) -> Result<Vec<ClusterHost>, Vec<Diagnostic>> {
    apply_filters(cluster, &parse_hostfile_entries(file, text)?)
}

/// Returns those of the hosts `named`, which come from `cluster.hosts`, that the filters
/// `cluster.include` and `cluster.exclude` select.
fn apply_filters(cluster: &ClusterSpec, named: &[ClusterHost]) -> Result<Vec<ClusterHost>, Vec<Diagnostic>> {
    let names: Vec<(String, HostSlots)> =
        named.iter().map(|h| (h.host.name_with_port(), h.slots.clone())).collect();
    let selected = filter_hosts(&names, &cluster.include, &cluster.exclude).map_err(|error| {
        let key = if error.exclude { "cluster.exclude" } else { "cluster.include" };
        let item = error.item.map_or_else(|| key.to_owned(), |item| format!("{key}[{item}]"));
        let diagnostic = Diagnostic::error(error.code(), format!("`{key}` {error}"));
        vec![diagnostic.with_subject(item).with_help("name hosts as in `cluster.hosts`")]
    })?;
    let host = |(index, slots): (usize, HostSlots)| {
        named.get(index).map(|h| ClusterHost { host: h.host.clone(), slots })
    };
    Ok(selected.into_iter().filter_map(host).collect())
}

/// Parses `texts`, the items of `cluster.hosts`, each of which is a host name or a range of host
/// names such as `node[1-4]`. Fails if they name more than [`MAX_HOSTS`] hosts.
fn parse_host_list(texts: &[String]) -> Result<Vec<ClusterHost>, Vec<Diagnostic>> {
    let mut hosts = Vec::new();
    for (item, text) in texts.iter().enumerate() {
        let invalid = |code, message: String| {
            let diagnostic = Diagnostic::error(code, message).with_subject(format!("cluster.hosts[{item}]"));
            vec![diagnostic.with_help("docs/job.md describes the notation of `cluster.hosts`")]
        };
        let parsed = parse_hosts(text).map_err(|error| invalid(error.code(), format!("`{text}` {error}")))?;
        if hosts.len() + parsed.len() > MAX_HOSTS {
            let message = format!("the job names more than {MAX_HOSTS} hosts");
            return Err(invalid(codes::JOB_VALUE_OUT_OF_RANGE, message));
        }
        hosts.extend(parsed.into_iter().map(|host| ClusterHost { host, slots: HostSlots::Auto }));
    }
    Ok(hosts)
}

/// Reads the text of the hostfile `file`, which lists the hosts of a job, without parsing it. Fails
/// if the file is larger than [`MAX_HOSTFILE_BYTES`] bytes.
pub(crate) fn read_hostfile(file: &Path) -> diagnostic::Result<String> {
    let path = file.display().to_string();
    let unreadable = |message: String| {
        let diagnostic = Diagnostic::error(codes::HOSTFILE_UNREADABLE, message);
        diagnostic.with_subject("cluster.hosts").with_field("file", path.as_str())
    };
    let bytes = read_input_file(file, MAX_HOSTFILE_BYTES as u64)
        .map_err(|error| unreadable(format!("cannot read the hostfile {path}")).with_cause(&error))?;
    if bytes.len() > MAX_HOSTFILE_BYTES {
        return Err(unreadable(format!("the hostfile {path} is larger than 4 MiB")));
    }
    String::from_utf8(bytes).map_err(|_| unreadable(format!("the hostfile {path} is not UTF-8 text")))
}

/// Parses the text of a hostfile into its hosts and their slots (places for workers). The error
/// contains the first [`MAX_REPORTED_ERRORS`] mistakes. Messages name the path `file`.
pub(crate) fn parse_hostfile_entries(file: &Path, text: &str) -> Result<Vec<ClusterHost>, Vec<Diagnostic>> {
    let entries = parse_hostfile(text).map_err(|errors| {
        let diagnostic = |error: HostfileError| {
            let (path, line, column) = (file.display(), error.line, error.column);
            Diagnostic::error(error.code(), format!("the hostfile {path}:{line}:{column}: {error}"))
                .with_subject("cluster.hosts")
                .with_field("file", path.to_string())
                .with_field("line", line)
                .with_field("column", column)
                .with_help("a line is `host slots=N`, as in DeepSpeed and Open MPI")
        };
        errors.into_iter().take(MAX_REPORTED_ERRORS).map(diagnostic).collect::<Vec<_>>()
    })?;
    let host = |entry: HostfileEntry| ClusterHost {
        host: entry.host,
        slots: entry.slots.map_or(HostSlots::Auto, HostSlots::Count),
    };
    Ok(entries.into_iter().map(host).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads a job whose section `cluster` has the text `cluster`, and formats its hosts as
    /// `HOST=SLOTS`. Returns `local` if the job names no hosts.
    fn format_hosts(cluster: &str, base: &Path) -> Result<String, Vec<Diagnostic>> {
        let source = jobspec::JobSource::Text {
            name: "job.yaml".into(),
            text: format!("run: {{command: [a]}}\ncluster: {cluster}"),
        };
        let (job, ..) = jobspec::load_job(source, &[]).expect("a job");
        let hosts = resolve_hosts(&job.cluster, base)?;
        let text = |h: &ClusterHost| format!("{}={:?}", h.host, h.slots);
        Ok(hosts.map_or("local".to_owned(), |hosts| hosts.iter().map(text).collect::<Vec<_>>().join(" ")))
    }

    #[test]
    fn hosts_come_from_lists_and_hostfiles() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("hosts"), "a slots=2\nb slots=1 # one\n").expect("a file");
        for (cluster, expected) in [
            ("{}", "local"),
            ("{hosts: [x, 'me@n[1-2]:22']}", "x=Auto me@n1:22=Auto me@n2:22=Auto"),
            ("{hosts: {file: hosts}}", "a=Count(2) b=Count(1)"),
            ("{hosts: {file: hosts}, include: 'a:1'}", "a=Selected([1])"),
            ("{hosts: [x, y], exclude: [x]}", "y=Auto"),
        ] {
            assert_eq!(format_hosts(cluster, dir.path()).as_deref(), Ok(expected), "{cluster}");
        }
    }

    #[test]
    fn mistakes_in_cluster_hosts_name_their_key() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("bad"), "a slots=2\na slots=1\nb x\n").expect("a file");
        for (cluster, key, code) in [
            ("{hosts: {file: none}}", "cluster.hosts", codes::HOSTFILE_UNREADABLE),
            ("{hosts: {file: bad}}", "cluster.hosts", codes::HOSTFILE_INVALID),
            ("{hosts: [a], include: [b]}", "cluster.include[0]", codes::JOB_HOST_FILTER_INVALID),
            ("{include: [b]}", "cluster.include", codes::JOB_HOST_FILTER_INVALID),
        ] {
            let errors = format_hosts(cluster, dir.path()).expect_err(cluster);
            assert_eq!((errors[0].subject(), errors[0].code()), (Some(key), code), "{cluster}");
        }
        let errors = format_hosts("{hosts: {file: bad}}", dir.path()).expect_err("two mistakes");
        assert_eq!((errors[0].field("line"), errors[0].field("column")), (Some(&2.into()), Some(&1.into())));
    }
}
