//! [`ContainerCommandBuilder`]: builds the commands that start a worker in a container
//! (`run.container`) and remove the container of a killed worker.
use crate::secrets::select_passed_variables;
use diagnostic::{Diagnostic, codes::host};
use jobspec::{ContainerMount, ContainerRuntime, ContainerSpec, DeviceSelection, env};
use nix::unistd::{Uid, User, getgid, getuid};
use protocol::control::{ExecId, HostPlan, WorkerPlan};
use std::{collections::BTreeSet, path::Path};

/// A shell script that changes to the directory `$1`, the first argument, and then executes the
/// other arguments as a command. Container runtimes without an option for the working directory
/// start it in the container.
const CHANGE_DIRECTORY_SCRIPT: &str = "cd -- \"$1\" && shift && exec \"$@\"";
/// The longest name that launch gives a container, in bytes.
const MAX_CONTAINER_NAME_BYTES: usize = 128;
/// The prefix by which Apptainer recognizes a variable in its environment that it must set, without
/// the prefix, inside the container.
const APPTAINER_PASS_PREFIX: &str = "APPTAINERENV_";
/// The environment variables to which Apptainer gives new values in a container, instead of the
/// values that they have on the host.
const APPTAINER_REPLACED_VARIABLES: [&str; 2] = ["PATH", "LD_LIBRARY_PATH"];

/// The vendor of the GPUs that a container must see, which decides the options of the container
/// runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContainerGpuVendor {
    None,
    Nvidia,
    Amd,
}

impl ContainerGpuVendor {
    /// Detects the vendor of the GPUs of this host by their device files. Returns `None` for a job
    /// that uses only CPUs.
    fn detect(devices: &DeviceSelection) -> ContainerGpuVendor {
        match devices {
            DeviceSelection::Cpu => ContainerGpuVendor::None,
            _ if Path::new("/dev/nvidiactl").exists() => ContainerGpuVendor::Nvidia,
            _ if Path::new("/dev/kfd").exists() => ContainerGpuVendor::Amd,
            _ => ContainerGpuVendor::None,
        }
    }
}

/// Builds the commands that start and remove the container of one worker, or of one command of
/// `launch exec`.
pub(super) struct ContainerCommandBuilder<'a> {
    spec: &'a ContainerSpec,
    /// The name of the container in Docker and Podman.
    name: String,
    run: &'a str,
    workdir: &'a Path,
    run_dir: &'a Path,
    gpus: ContainerGpuVendor,
    /// The user and the group of the agent.
    user: (u32, u32),
    uses_terminal: bool,
    /// The variables of the agent that `run.pass_env` selects. On other hosts they are variables of
    /// the worker.
    passed: Vec<String>,
    /// The mounts by which the container sees the hang hook.
    hook_mounts: Vec<ContainerMount>,
}

impl<'a> ContainerCommandBuilder<'a> {
    /// Creates the builder for the container of a worker or, if `exec` is given, for the container
    /// of a `launch exec` command that runs next to the worker. Returns `None` for a job without
    /// `run.container`.
    pub(super) fn for_worker(
        plan: &'a HostPlan,
        worker: &'a WorkerPlan,
        exec: Option<ExecId>,
    ) -> Option<Self> {
        let spec = plan.job.run.container.as_ref()?;
        let suffix = exec.map(|id| format!("-exec-{id:x}")).unwrap_or_default();
        Some(ContainerCommandBuilder {
            spec,
            name: build_container_name(&plan.run, &format!("-{}-{}{suffix}", plan.attempt, worker.rank)),
            run: &plan.run,
            workdir: &worker.workdir,
            run_dir: &plan.run_dir,
            gpus: ContainerGpuVendor::detect(&plan.job.cluster.devices),
            user: (getuid().as_raw(), getgid().as_raw()),
            uses_terminal: exec.is_none() && plan.job.run.terminal == Some(worker.rank),
            // The controller has rejected patterns that are not valid.
            passed: select_passed_variables(&plan.job.run, std::env::vars_os())
                .map(|passed| passed.into_iter().map(|(name, _)| name).collect())
                .unwrap_or_default(),
            hook_mounts: Vec::new(),
        })
    }

    /// Adds the mounts that make the directory of the hang hook (a Python module that workers load)
    /// visible in the container; the first mount is that directory. Returns `false` if the runtime
    /// cannot mount the directory for `worker`.
    pub(super) fn add_hook_mounts(&mut self, mounts: Vec<ContainerMount>, worker: &WorkerPlan) -> bool {
        let Some(directory) = mounts.first().map(|mount| Path::new(&mount.source)) else { return false };
        if self.spec.runtime != ContainerRuntime::Charliecloud {
            self.hook_mounts = mounts;
            return true;
        }
        // Charliecloud mounts only at directories that the image contains, and mounts the directory
        // of the host for temporary files.
        let temporary = worker.env.iter().rfind(|(name, _)| name == env::TMPDIR);
        let sees_tmp = temporary.is_none_or(|(_, directory)| directory == "/tmp");
        let of_job = self.spec.mounts.iter().filter(|mount| mount.source == mount.target);
        let mut visible = of_job.map(|mount| Path::new(&mount.source)).chain([self.workdir, self.run_dir]);
        (sees_tmp && directory.starts_with("/tmp")) || visible.any(|path| directory.starts_with(path))
    }

    /// Changes the command of a worker so that the command starts a container and runs the worker's
    /// program in it. The words of the runtime precede those of `run.wrap`, which run in the
    /// container, too. Fails if a path cannot be mounted.
    pub(super) fn wrap_command(&self, worker: &mut WorkerPlan) -> diagnostic::Result<()> {
        let mounts = self.collect_mounts()?;
        let mut words = match self.spec.runtime {
            ContainerRuntime::Apptainer => self.build_apptainer_command(&mounts, worker),
            ContainerRuntime::Enroot => self.build_enroot_command(&mounts, worker),
            ContainerRuntime::Podman | ContainerRuntime::Docker => self.build_docker_command(&mounts, worker),
            ContainerRuntime::Charliecloud => self.build_charliecloud_command(&mounts, worker)?,
        };
        words.append(&mut worker.wrapper);
        worker.wrapper = words;
        Ok(())
    }

    /// Builds the command that stops the container and removes it from the container runtime's list
    /// of containers. Returns `None` if the container ends with the process of its runtime.
    pub(super) fn build_removal_command(&self) -> Option<Vec<String>> {
        let runtime = self.spec.runtime;
        let has_record = matches!(runtime, ContainerRuntime::Docker | ContainerRuntime::Podman);
        has_record.then(|| to_owned_strings(&[runtime.program(), "rm", "--force", &self.name]))
    }

    /// Collects the directories to mount in the container: those that the job lists, the working
    /// directory, the run directory and the directory of the hang hook. Fails if one does not
    /// exist, or if its path contains a separator.
    fn collect_mounts(&self) -> diagnostic::Result<Vec<ContainerMount>> {
        let mut mounts = self.spec.mounts.clone();
        for directory in [self.workdir, self.run_dir] {
            let path = directory.to_string_lossy().into_owned();
            let is_covered = |mount: &ContainerMount| {
                mount.source == mount.target && !mount.read_only && directory.starts_with(&mount.source)
            };
            if !mounts.iter().any(is_covered) {
                mounts.push(ContainerMount { source: path.clone(), target: path, read_only: false });
            }
        }
        mounts.extend(self.hook_mounts.iter().cloned());
        for ContainerMount { source, .. } in &mounts {
            let reason = match Path::new(source).try_exists() {
                _ if source.contains([':', ',']) => "its path contains a colon or a comma".to_owned(),
                Ok(true) => continue,
                Ok(false) => "it does not exist".to_owned(),
                Err(error) => error.to_string(),
            };
            let message = format!("cannot mount {source} in the container: {reason}");
            return Err(Diagnostic::error(host::CONTAINER_MOUNT_UNUSABLE, message)
                .with_subject(source)
                .with_remedy());
        }
        Ok(mounts)
    }

    /// Builds the `apptainer exec` command line that runs the worker's program in its container.
    /// Apptainer passes the environment, except for the variables that it replaces, and shares
    /// devices, network and process numbers with the host.
    fn build_apptainer_command(&self, mounts: &[ContainerMount], worker: &mut WorkerPlan) -> Vec<String> {
        let mut words = to_owned_strings(&["apptainer", "exec"]);
        match self.gpus {
            ContainerGpuVendor::None => {}
            ContainerGpuVendor::Nvidia => words.push("--nv".to_owned()),
            ContainerGpuVendor::Amd => words.push("--rocm".to_owned()),
        }
        for mount in mounts {
            words.extend(["--bind".to_owned(), format_bind_mount(mount)]);
        }
        words.extend(["--pwd".to_owned(), self.workdir.to_string_lossy().into_owned()]);
        let replaced: Vec<(String, String)> = worker
            .env
            .iter()
            .filter(|(name, _)| APPTAINER_REPLACED_VARIABLES.contains(&name.as_str()))
            .cloned()
            .collect();
        worker.env.extend(
            replaced.into_iter().map(|(name, value)| (APPTAINER_PASS_PREFIX.to_owned() + &name, value)),
        );
        self.append_job_options_and_image(words)
    }

    /// Builds the `enroot start` command line that runs the worker's program in its container, with
    /// an option for each environment variable to pass.
    fn build_enroot_command(&self, mounts: &[ContainerMount], worker: &mut WorkerPlan) -> Vec<String> {
        let mut words = to_owned_strings(&["enroot", "start", "--rw"]);
        for mount in mounts {
            let options = if mount.read_only { "x-create=auto,rbind,ro" } else { "x-create=auto,rbind" };
            words.extend(["--mount".to_owned(), format!("{}:{}:none:{options}", mount.source, mount.target)]);
        }
        if self.gpus == ContainerGpuVendor::Nvidia && !plan_sets_variable(worker, env::NVIDIA_VISIBLE_DEVICES)
        {
            // The hook of enroot mounts the driver of the host because of this variable.
            worker.env.push((env::NVIDIA_VISIBLE_DEVICES.to_owned(), "all".to_owned()));
        }
        words.extend(self.list_environment_options(worker));
        let mut words = self.append_job_options_and_image(words);
        words.extend(to_owned_strings(&["sh", "-c", CHANGE_DIRECTORY_SCRIPT, "sh"]));
        words.push(self.workdir.to_string_lossy().into_owned());
        words
    }

    /// Builds the `docker run` or `podman run` command line that runs the worker's program in its
    /// container. The container shares the network, shared memory and process numbers of the host,
    /// as ranks need them. Only the names of variables are arguments, because every user of the
    /// host can list arguments.
    fn build_docker_command(&self, mounts: &[ContainerMount], worker: &mut WorkerPlan) -> Vec<String> {
        let runtime = self.spec.runtime;
        let mut words = to_owned_strings(&[runtime.program(), "run", "--rm", "--name", &self.name]);
        words.extend(["--label".to_owned(), format!("launch.run={}", self.run)]);
        words.extend(to_owned_strings(&["--network", "host", "--ipc", "host", "--pid", "host"]));
        let (uid, gid) = self.user;
        match runtime {
            ContainerRuntime::Podman if uid != 0 => words.extend(to_owned_strings(&["--userns", "keep-id"])),
            ContainerRuntime::Docker => {
                words.extend(["--user".to_owned(), format!("{uid}:{gid}")]);
                let cpus: Vec<String> = worker.cpus.iter().map(u32::to_string).collect();
                // The daemon starts the container, so it does not inherit the CPUs of its client.
                if !cpus.is_empty() {
                    words.extend(["--cpuset-cpus".to_owned(), cpus.join(",")]);
                }
            }
            _ => {}
        }
        match self.gpus {
            ContainerGpuVendor::None => {}
            ContainerGpuVendor::Nvidia if runtime == ContainerRuntime::Docker => {
                words.extend(to_owned_strings(&["--gpus", "all"]));
            }
            ContainerGpuVendor::Nvidia => words.extend(to_owned_strings(&["--device", "nvidia.com/gpu=all"])),
            ContainerGpuVendor::Amd => words.extend(to_owned_strings(&[
                "--device",
                "/dev/kfd",
                "--device",
                "/dev/dri",
                "--group-add",
                "video",
            ])),
        }
        if self.uses_terminal {
            words.extend(to_owned_strings(&["--interactive", "--tty"]));
        }
        for mount in mounts {
            words.extend(["--volume".to_owned(), format_bind_mount(mount)]);
        }
        words.extend(["--workdir".to_owned(), self.workdir.to_string_lossy().into_owned()]);
        words.extend(self.list_environment_options(worker));
        // The command replaces an entry point of the image, which could change it.
        words.extend(to_owned_strings(&["--entrypoint", ""]));
        self.append_job_options_and_image(words)
    }

    /// Builds the `ch-run` command line (Charliecloud) that runs the worker's program in its
    /// container. `ch-run` passes the environment and shares devices, network and process numbers
    /// with the host. Fails for a read-only mount.
    fn build_charliecloud_command(
        &self,
        mounts: &[ContainerMount],
        worker: &mut WorkerPlan,
    ) -> diagnostic::Result<Vec<String>> {
        let mut words = to_owned_strings(&["ch-run"]);
        for mount in mounts {
            if mount.read_only {
                let message = format!("Charliecloud cannot mount {} read-only", mount.source);
                return Err(Diagnostic::error(host::CONTAINER_MOUNT_UNUSABLE, message)
                    .with_subject(&mount.source)
                    .with_remedy());
            }
            words.extend(["--bind".to_owned(), format_bind_mount(mount)]);
        }
        words.extend(["--cd".to_owned(), self.workdir.to_string_lossy().into_owned()]);
        // ch-run mounts this directory of the host at /tmp, which would hide a working directory
        // below /tmp.
        if !plan_sets_variable(worker, env::TMPDIR) {
            worker.env.push((env::TMPDIR.to_owned(), "/tmp".to_owned()));
        }
        // ch-run fails without this variable, which services may lack.
        if std::env::var_os(env::USER).is_none() && !plan_sets_variable(worker, env::USER) {
            let user = User::from_uid(Uid::from_raw(self.user.0)).ok().flatten();
            let name = user.map_or_else(|| self.user.0.to_string(), |user| user.name);
            worker.env.push((env::USER.to_owned(), name));
        }
        let mut words = self.append_job_options_and_image(words);
        words.push("--".to_owned());
        Ok(words)
    }

    /// Returns the `--env NAME` options of a container runtime that pass the environment variables
    /// of a worker into its container.
    fn list_environment_options(&self, worker: &WorkerPlan) -> Vec<String> {
        let set = worker.env.iter().map(|(name, _)| name);
        let names: BTreeSet<&String> = set.chain(&self.passed).collect();
        names.into_iter().flat_map(|name| ["--env".to_owned(), name.clone()]).collect()
    }

    /// Appends to `words`, the command line of a container runtime, the options that the user has
    /// set in `run.container` and then the name of the image.
    fn append_job_options_and_image(&self, mut words: Vec<String>) -> Vec<String> {
        words.extend(self.spec.options.iter().cloned());
        words.push(self.spec.image.clone());
        words
    }
}

/// Builds the name that launch gives a container: `launch-`, the name of the run and `suffix`, with
/// characters that Docker does not permit replaced by `-`.
fn build_container_name(run: &str, suffix: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    let run: String = run.chars().map(|c| if fits(c) { c } else { '-' }).collect();
    let length = run.len().min(MAX_CONTAINER_NAME_BYTES - suffix.len().min(MAX_CONTAINER_NAME_BYTES / 2));
    format!("launch-{}{suffix}", &run[..length])
}

/// Formats a directory to mount in the form that Apptainer, Docker and Charliecloud understand:
/// `SOURCE:TARGET`, with `:ro` if it is read-only.
fn format_bind_mount(mount: &ContainerMount) -> String {
    format!("{}:{}{}", mount.source, mount.target, if mount.read_only { ":ro" } else { "" })
}

/// Returns whether the controller has set the environment variable `name` for a worker.
fn plan_sets_variable(worker: &WorkerPlan, name: &str) -> bool {
    worker.env.iter().any(|(set, _)| set == name)
}

/// Converts string slices to owned strings.
fn to_owned_strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Returns an error that names the missing container runtime if `error` reports that the program
/// which starts a worker's container was not found.
pub(super) fn explain_missing_runtime(error: Diagnostic, plan: &HostPlan) -> Diagnostic {
    let Some(spec) = &plan.job.run.container else { return error };
    if error.code() != host::WORKER_WRAPPER_MISSING {
        return error;
    }
    let program = spec.runtime.program();
    Diagnostic::error(
        host::CONTAINER_RUNTIME_MISSING,
        format!("host {} has no program `{program}`", plan.host),
    )
    .with_subject("run.container.runtime")
    .with_field("program", program)
    .with_remedy()
}

#[cfg(test)]
mod tests;
