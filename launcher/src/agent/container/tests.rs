//! Tests of the words that start workers in containers.
use super::*;
use jobspec::ContainerRuntime::{Apptainer, Charliecloud, Docker, Enroot, Podman};
use std::collections::BTreeMap;

/// Creates the container of a worker with this working directory, in a job without hang detection.
fn build_container<'a>(
    spec: &'a ContainerSpec,
    workdir: &'a str,
    gpus: ContainerGpuVendor,
) -> ContainerCommandBuilder<'a> {
    ContainerCommandBuilder {
        spec,
        name: "launch-r-0-3".to_owned(),
        run: "r",
        workdir: Path::new(workdir),
        run_dir: Path::new("/tmp/runs"),
        gpus,
        user: (1000, 100),
        uses_terminal: false,
        passed: to_owned_strings(&["HF_HOME"]),
        hook_mounts: Vec::new(),
    }
}

/// Creates the plan of a worker in a container.
fn build_worker() -> WorkerPlan {
    WorkerPlan {
        rank: 3,
        local_rank: 1,
        local_world: 2,
        command: Some(to_owned_strings(&["train"])),
        wrapper: to_owned_strings(&["nsys", "profile"]),
        env: [("RANK", "3"), ("PATH", "/opt/bin"), ("TOKEN", "secret")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec(),
        workdir: "/".into(),
        cpus: vec![2, 3],
        threads: 2,
        log: "/tmp/rank-3.log".into(),
    }
}

/// Returns the arguments that precede the command `train` of a worker in a container, and the
/// variables of the worker.
fn build_command_line(
    runtime: ContainerRuntime,
    mounts: &[ContainerMount],
    gpus: ContainerGpuVendor,
) -> diagnostic::Result<(String, BTreeMap<String, String>)> {
    let spec = ContainerSpec {
        image: "image".to_owned(),
        runtime,
        mounts: mounts.to_vec(),
        options: to_owned_strings(&["--option", "1"]),
    };
    let container = build_container(&spec, "/", gpus);
    let mut worker = build_worker();
    container.wrap_command(&mut worker)?;
    let text = worker.wrapper.join(" ");
    assert!(!text.contains("secret"), "a value is an argument: {text}");
    assert!(text.ends_with(" nsys profile"), "the wrapper does not run in the container: {text}");
    Ok((text.trim_end_matches(" nsys profile").to_owned(), worker.env.into_iter().collect()))
}

/// Returns a mount of this directory at the same path.
fn mount(path: &str, target: &str, read_only: bool) -> ContainerMount {
    ContainerMount { source: path.to_owned(), target: target.to_owned(), read_only }
}

#[test]
fn each_runtime_gets_its_options() {
    let mounts = [mount("/usr", "/data", true)];
    let words = |runtime, gpus| build_command_line(runtime, &mounts, gpus).expect("words").0;
    assert_eq!(
        words(Apptainer, ContainerGpuVendor::Nvidia),
        "apptainer exec --nv --bind /usr:/data:ro --bind /:/ --pwd / --option 1 image"
    );
    assert_eq!(
        words(Enroot, ContainerGpuVendor::None),
        "enroot start --rw --mount /usr:/data:none:x-create=auto,rbind,ro --mount /:/:none:x-create=auto,rbind \
         --env HF_HOME --env PATH --env RANK --env TOKEN --option 1 image sh -c \
         cd -- \"$1\" && shift && exec \"$@\" sh /"
    );
    assert_eq!(
        words(Podman, ContainerGpuVendor::None),
        "podman run --rm --name launch-r-0-3 --label launch.run=r --network host --ipc host --pid host --userns \
         keep-id --volume /usr:/data:ro --volume /:/ --workdir / --env HF_HOME --env PATH --env RANK --env \
         TOKEN --entrypoint  --option 1 image"
    );
    let docker = words(Docker, ContainerGpuVendor::Nvidia);
    for part in [" --user 1000:100 ", " --cpuset-cpus 2,3 ", " --gpus all "] {
        assert!(docker.contains(part), "{docker}");
    }
    assert!(words(Podman, ContainerGpuVendor::Amd).contains(" --device /dev/kfd --device /dev/dri "));
    let (text, _) =
        build_command_line(Charliecloud, &[mount("/usr", "/data", false)], ContainerGpuVendor::Nvidia)
            .unwrap();
    assert_eq!(text, "ch-run --bind /usr:/data --bind /:/ --cd / --option 1 image --");
}

#[test]
fn variables_that_a_runtime_replaces_are_passed() {
    let (_, env) = build_command_line(Apptainer, &[], ContainerGpuVendor::None).unwrap();
    assert_eq!(env["APPTAINERENV_PATH"], "/opt/bin");
    let (words, env) = build_command_line(Enroot, &[], ContainerGpuVendor::Nvidia).unwrap();
    assert_eq!(env["NVIDIA_VISIBLE_DEVICES"], "all");
    assert!(words.contains("--env NVIDIA_VISIBLE_DEVICES"), "{words}");
}

#[test]
fn directories_of_the_job_are_mounted_once() {
    let (text, _) =
        build_command_line(Charliecloud, &[mount("/", "/", false)], ContainerGpuVendor::None).unwrap();
    assert_eq!(text, "ch-run --bind /:/ --cd / --option 1 image --");
}

/// Returns whether a container of `runtime` sees the hang hook in `directory` if the worker has
/// these variables, and how many mounts are added for that.
fn add_hook(runtime: ContainerRuntime, directory: &str, variables: &[(&str, &str)]) -> (bool, usize) {
    let spec = ContainerSpec {
        image: "image".to_owned(),
        runtime,
        mounts: vec![mount("/data", "/data", false)],
        options: vec![],
    };
    let mut container = build_container(&spec, "/work", ContainerGpuVendor::None);
    let mut worker = build_worker();
    worker.env.extend(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    let mounts = vec![mount(directory, directory, false), mount(directory, directory, true)];
    (container.add_hook_mounts(mounts, &worker), container.hook_mounts.len())
}

#[test]
fn the_hang_hook_is_visible_in_containers() {
    for runtime in [Apptainer, Enroot, Podman, Docker] {
        assert_eq!(add_hook(runtime, "/scratch/hook", &[]), (true, 2));
    }
    for (directory, variables, is_visible) in [
        ("/tmp/hook", &[][..], true),
        ("/tmp/hook", &[("TMPDIR", "/tmp")], true),
        ("/tmp/hook", &[("TMPDIR", "/scratch")], false),
        ("/scratch/hook", &[], false),
        ("/data/hook", &[("TMPDIR", "/scratch")], true),
        ("/work/hook", &[], true),
    ] {
        assert_eq!(
            add_hook(Charliecloud, directory, variables),
            (is_visible, 0),
            "{directory} {variables:?}"
        );
    }
}

#[test]
fn unusable_mounts_are_rejected() {
    for (runtime, path, read_only) in [(Podman, "/no/such/path", false), (Charliecloud, "/usr", true)] {
        let error = build_command_line(runtime, &[mount(path, path, read_only)], ContainerGpuVendor::None)
            .unwrap_err();
        assert_eq!((error.code(), error.subject()), (host::CONTAINER_MOUNT_UNUSABLE, Some(path)));
    }
}

#[test]
fn names_have_only_permitted_characters() {
    assert_eq!(build_container_name("a b/ü", "-0-1"), "launch-a-b---0-1");
    assert_eq!(
        build_container_name(&"x".repeat(500), "-0-1").len(),
        "launch-".len() + MAX_CONTAINER_NAME_BYTES
    );
}
