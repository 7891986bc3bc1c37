//! [`read_mig_uuids`]: asks `nvidia-smi` for the UUIDs of MIG instances, which no file contains.
use std::{
    collections::BTreeMap,
    io::Read,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

/// The time limit for running `nvidia-smi -L`. It is killed afterwards, and the UUIDs remain
/// unknown.
const NVIDIA_SMI_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest number of bytes of the output of `nvidia-smi -L` that are read.
const MAX_OUTPUT_BYTES: u64 = 256 << 10;

/// The UUIDs of the MIG instances on this machine, as a map from the UUID of a GPU to the UUIDs of
/// its instances.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct MigUuids(BTreeMap<String, Vec<String>>);

impl MigUuids {
    /// Returns the UUIDs of the MIG instances of a GPU, or an empty list if the GPU is unknown.
    pub(super) fn list_for_gpu(&self, gpu: Option<&str>) -> &[String] {
        gpu.and_then(|gpu| self.0.get(gpu)).map_or(&[], Vec::as_slice)
    }

    /// Parses the UUIDs of GPUs and their MIG instances from the output of `nvidia-smi -L`. A line
    /// for each GPU is followed by lines for its MIG instances. Lines that contain no UUID are
    /// ignored.
    pub(super) fn parse(text: &str) -> MigUuids {
        let mut by_gpu: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut gpu = None;
        for line in text.lines() {
            let uuid = line.split_once("(UUID: ").and_then(|(_, rest)| rest.trim_end().strip_suffix(')'));
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '/');
            let Some(uuid) = uuid.filter(|uuid| uuid.len() <= 128 && uuid.chars().all(is_plain)) else {
                continue;
            };
            if uuid.starts_with("MIG-") {
                if let Some(gpu) = &gpu {
                    by_gpu.entry(String::clone(gpu)).or_default().push(uuid.to_owned());
                }
            } else {
                gpu = Some(uuid.to_owned());
            }
        }
        MigUuids(by_gpu)
    }
}

/// Runs `nvidia-smi -L` (`program` is the path of `nvidia-smi`), and returns the UUIDs of the
/// listed MIG instances. The result is empty if the program is missing, fails or exceeds
/// [`NVIDIA_SMI_TIMEOUT`].
pub(super) fn read_mig_uuids(program: &str) -> MigUuids {
    run_nvidia_smi_list(program, NVIDIA_SMI_TIMEOUT)
        .map_or_else(MigUuids::default, |text| MigUuids::parse(&text))
}

/// Runs `nvidia-smi -L` in a separate process group for at most `limit`, and returns its output.
/// `program` is the path of `nvidia-smi`. Returns `None` if the output is not complete at this
/// time.
fn run_nvidia_smi_list(program: &str, limit: Duration) -> Option<String> {
    let mut command = Command::new(program);
    command.arg("-L").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut child = command.spawn().ok()?;
    let output = child.stdout.take()?;
    let (sender, receiver) = mpsc::sync_channel(1);
    let read = move || {
        let mut text = String::new();
        let complete = output.take(MAX_OUTPUT_BYTES).read_to_string(&mut text).is_ok();
        // The receiver may have given up.
        _ = sender.send(complete.then_some(text));
    };
    let text = thread::Builder::new()
        .name("nvidia-smi".into())
        .spawn(read)
        .ok()
        .and_then(|_| receiver.recv_timeout(limit).ok().flatten());
    kill_and_reap_process_group(&mut child);
    text
}

/// Kills the process group of a child process that is no longer needed, and reaps the child
/// process.
fn kill_and_reap_process_group(child: &mut Child) {
    // The child is not reaped yet, so its process id is not reused.
    let group = nix::unistd::Pid::from_raw(child.id() as i32);
    _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
    _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt, time::Instant};

    #[test]
    fn instances_are_listed_by_gpu() {
        let text = "GPU 0: NVIDIA A100 (UUID: GPU-a)\n  MIG 1g.5gb Device  0: (UUID: MIG-1)\n  \
                    MIG 2g.10gb Device  1: (UUID: MIG-2)\nGPU 1: x (UUID: GPU-b)\nwarning\n  \
                    MIG 3g Device 0: (UUID: MIG-GPU-b/1/0)\n  MIG (UUID: MIG-a b)\n  MIG (UUID: MIG-3\n";
        let uuids = MigUuids::parse(text);
        assert_eq!(uuids.list_for_gpu(Some("GPU-a")), ["MIG-1", "MIG-2"]);
        assert_eq!(uuids.list_for_gpu(Some("GPU-b")), ["MIG-GPU-b/1/0"]);
        assert!(uuids.list_for_gpu(Some("GPU-c")).is_empty() && uuids.list_for_gpu(None).is_empty());
        assert_eq!(MigUuids::parse("  MIG (UUID: MIG-1)\n"), MigUuids::default(), "an instance without GPU");
    }

    /// Checks that a tool is read, and that a missing tool and a tool that hangs give nothing.
    #[test]
    fn a_tool_that_hangs_is_killed() {
        let directory = tempfile::tempdir().expect("directory");
        let write = |name: &str, script: &str| {
            let path = directory.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a script");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("permissions");
            path.to_str().expect("UTF-8").to_owned()
        };
        let good = write("good", "echo \"GPU 0: x (UUID: GPU-a)\"; echo \"  MIG (UUID: MIG-$1)\"");
        assert_eq!(read_mig_uuids(&good).list_for_gpu(Some("GPU-a")), ["MIG--L"]);
        let pid_file = directory.path().join("pid");
        let hung = write("hung", &format!("sleep 300 & echo $! > {}; wait", pid_file.display()));
        let start = Instant::now();
        assert_eq!(run_nvidia_smi_list(&hung, Duration::from_secs(1)), None);
        assert!(start.elapsed() < Duration::from_secs(60));
        let pid = fs::read_to_string(&pid_file).expect("the script ran");
        let has_ended = || {
            let state = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            state.is_empty() || state.contains(") Z ")
        };
        // The kernel ends the killed process when it next runs.
        while !has_ended() {
            assert!(start.elapsed() < Duration::from_secs(60), "the whole group is killed");
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(run_nvidia_smi_list("/nonexistent/nvidia-smi", NVIDIA_SMI_TIMEOUT), None);
    }
}
