//! [`gpu_checks`]: evaluates what was found about the GPUs of a host.
use super::{Check, codes};
use crate::cmd::plan::bytes;
use contract::probe::{GpuReport, HostInspection, LibraryReport};
use diagnostic::Diagnostic;

/// Checks number, driver, libraries, memory, health and links of a host's GPUs. `first` is the
/// first host of the job, and `slots` the number of slots in the hostfile.
pub(super) fn gpu_checks(host: &HostInspection, first: &HostInspection, slots: Option<u32>) -> Vec<Check> {
    let (gpus, first_gpus) = (&host.gpus, &first.gpus);
    let mut checks = vec![count_check(gpus, first, slots)];
    if let Some(driver) = &gpus.driver {
        checks.push(match first_gpus.driver.as_ref().filter(|other| *other != driver) {
            Some(other) => Check::warn(
                "driver",
                codes::LIBRARY_VERSION_DIFFERS,
                format!("{driver}, {} has {other}", first.hostname),
                "install the same driver on all hosts",
            ),
            None => Check::ok("driver", driver.clone()),
        });
    }
    match gpus.libraries.is_empty() {
        true => checks.push(nccl_check(gpus, first)),
        false => checks.extend(library_checks(gpus, first)),
    }
    checks.extend(memory_checks(gpus));
    checks.extend(health_checks(gpus));
    checks.extend(link_check(gpus));
    checks
}

fn count_check(gpus: &GpuReport, first: &HostInspection, slots: Option<u32>) -> Check {
    const NAME: &str = "gpus";
    let (count, first_count) = (gpus.gpus.len() as u32, first.gpus.gpus.len());
    let model = gpus.gpus.first().map_or("", |g| g.name.as_str());
    match (&gpus.error, slots) {
        (Some(error), _) => Check::warn(
            NAME,
            codes::GPU_DRIVER_UNUSABLE,
            format!("{} devices, but {error}", gpus.devices),
            "run `nvidia-smi` on the host",
        ),
        (None, Some(slots)) if count > 0 && slots > count => {
            let found = format!("{count} found, but the hostfile declares {slots} slots");
            let help = "correct the slots; ranks share GPUs, unless the job computes on CPUs";
            Check::warn(NAME, codes::GPUS_FEWER_THAN_SLOTS, found, help)
        }
        (None, _) if count as usize != first_count => Check::warn(
            NAME,
            codes::GPU_COUNT_DIFFERS,
            format!("{count}, {} has {first_count}", first.hostname),
            "look for a missing GPU with `nvidia-smi`",
        ),
        (None, _) if count == 0 => Check::ok(NAME, "none"),
        (None, _) => Check::ok(NAME, format!("{count} × {model}")),
    }
}

/// Checks that the NCCL library that the dynamic loader finds has the version of the first host.
fn nccl_check(gpus: &GpuReport, first: &HostInspection) -> Check {
    match (&gpus.nccl, &first.gpus.nccl) {
        (Some((_, version)), Some((_, other))) if version != other => Check::warn(
            "nccl",
            codes::LIBRARY_VERSION_DIFFERS,
            format!("{version}, {} has {other}", first.hostname),
            "install the same NCCL on all hosts",
        ),
        (Some((path, version)), _) => Check::ok("nccl", format!("{version} ({path})")),
        (None, _) => Check::ok("nccl", "not found by the loader (programs may contain it)"),
    }
}

/// Checks that the libraries that built-in training opens on GPUs are usable and have the versions
/// of the first host.
fn library_checks(gpus: &GpuReport, first: &HostInspection) -> Vec<Check> {
    const NAME: &str = "cuda";
    let first_version = |name: &str| {
        let library = first.gpus.libraries.iter().find(|library| library.name == name)?;
        library.result.as_ref().ok().map(|(version, _)| version.as_str())
    };
    let check = |LibraryReport { name, required, result }: &LibraryReport| match result {
        Ok((version, path)) => match first_version(name).filter(|other| other != version) {
            Some(other) => Check::warn(
                NAME,
                codes::LIBRARY_VERSION_DIFFERS,
                format!("{name} {version}, {} has {other}", first.hostname),
                "install the same version on all hosts",
            ),
            None => Check::ok(NAME, format!("{name} {version} ({})", path.display())),
        },
        Err(_) if name == "cuDNN" => Check::ok(NAME, "no cuDNN; attention uses launch's kernels"),
        Err(error) if *required => Check::failed(
            NAME,
            codes::CUDA_LIBRARY_MISSING,
            format!("{name}: {error}"),
            join_help(error, "install the library, or name its directory in `cluster.cuda_library_paths`"),
        ),
        Err(error) => Check::warn(
            NAME,
            codes::NCCL_MISSING,
            format!("{name}: {error}"),
            "only workers with a GPU each need it; otherwise collectives use host memory \
             (`cluster.comm_backend`)",
        ),
    };
    gpus.libraries.iter().map(check).collect()
}

/// Joins the help of an error, such as the searched directories, with further advice.
fn join_help(error: &Diagnostic, advice: &str) -> String {
    let help = error.help().iter().map(String::as_str).chain([advice]);
    help.collect::<Vec<_>>().join("; ")
}

/// Checks for memory errors, throttled clocks, and modes that limit how ranks can use a GPU.
fn health_checks(gpus: &GpuReport) -> Vec<Check> {
    const NAME: &str = "gpu health";
    let mut checks = Vec::new();
    for (index, gpu) in gpus.gpus.iter().enumerate() {
        let mut warn = |code, found: String, help: &str| {
            checks.push(Check::warn(NAME, code, format!("GPU {index} ({}): {found}", gpu.pci_address), help));
        };
        if let Some(errors @ 1..) = gpu.uncorrected_ecc_errors {
            let found = format!("{errors} memory errors that ECC could not correct");
            let help = "reset the GPU (`nvidia-smi --gpu-reset`); replace it if the errors return";
            warn(codes::GPU_MEMORY_ERRORS, found, help);
        }
        let (is_pending, has_failed) = gpu.remapped_rows;
        if is_pending {
            let found = "the replacement of memory rows is pending".to_owned();
            warn(codes::GPU_MEMORY_ERRORS, found, "reset the GPU: `nvidia-smi --gpu-reset`");
        }
        if has_failed {
            let found = "memory rows could not be replaced".to_owned();
            let help = "exclude the host (`cluster.exclude`) and replace the GPU";
            warn(codes::GPU_MEMORY_ERRORS, found, help);
        }
        if !gpu.throttle_reasons.is_empty() {
            let found = format!("clocks are throttled: {}", gpu.throttle_reasons.join(", "));
            warn(codes::GPU_THROTTLED, found, "check the cooling and the power supply");
        }
        if gpu.exclusive_compute {
            let found = "the compute mode is not the default".to_owned();
            let help = "`nvidia-smi --compute-mode=DEFAULT` allows several ranks";
            warn(codes::GPU_MODE_UNSUITABLE, found, help);
        }
        if gpu.mig_enabled {
            let found = "the GPU is partitioned into instances (MIG)".to_owned();
            let help = "a rank uses one instance, and NCCL does not connect instances";
            warn(codes::GPU_MODE_UNSUITABLE, found, help);
        }
    }
    if checks.is_empty() && !gpus.gpus.is_empty() {
        let has_ecc = gpus.gpus.iter().all(|gpu| gpu.uncorrected_ecc_errors.is_some());
        let found = if has_ecc { "no memory errors, full clocks" } else { "full clocks (no ECC)" };
        checks.push(Check::ok(NAME, found));
    }
    checks
}

/// Checks the connections between the GPUs of a host; `None` if it has fewer than two.
fn link_check(gpus: &GpuReport) -> Option<Check> {
    const NAME: &str = "gpu links";
    let (first, _) = (gpus.gpus.first()?, gpus.gpus.get(1)?);
    // Each pair once.
    let pairs = gpus.gpus.iter().enumerate().flat_map(|(index, gpu)| {
        let above = gpu.no_peer_access.iter().filter(move |(other, _)| *other as usize > index);
        above.map(move |(other, reason)| format!("{index} and {other} ({reason})"))
    });
    let pairs: Vec<String> = pairs.collect();
    let links: Vec<u32> = gpus.gpus.iter().map(|gpu| gpu.nvlinks).collect();
    Some(if !pairs.is_empty() {
        let found = format!("no direct access between GPUs {}", pairs.join(", "));
        let help = "check whether an IOMMU or PCIe ACS is enabled; NCCL transfers through host memory";
        Check::warn(NAME, codes::GPU_PEER_ACCESS_MISSING, found, help)
    } else if links.iter().any(|n| *n != first.nvlinks) {
        let found = format!("active NVLinks by GPU: {links:?}");
        let help = "links are down: run `nvidia-smi nvlink --status` and `dmesg | grep Xid`";
        Check::warn(NAME, codes::GPU_LINK_DOWN, found, help)
    } else if first.nvlinks > 0 {
        Check::ok(NAME, format!("{} NVLinks each", first.nvlinks))
    } else {
        Check::ok(NAME, "direct access over PCIe")
    })
}

/// Checks the free memory, and whether other processes use a GPU.
fn memory_checks(gpus: &GpuReport) -> Vec<Check> {
    const NAME: &str = "gpu memory";
    let fullest = gpus.gpus.iter().min_by_key(|g| g.memory_free);
    if let Some(gpu) = fullest.filter(|_| gpus.gpus.iter().all(|g| g.processes.is_empty())) {
        let found = format!("at least {} free of {}", bytes(gpu.memory_free), bytes(gpu.memory));
        return vec![Check::ok(NAME, found)];
    }
    let used = gpus.gpus.iter().enumerate().filter(|(_, g)| !g.processes.is_empty()).map(|(i, g)| {
        let processes: Vec<String> =
            g.processes.iter().map(|(pid, used)| format!("{pid} ({})", bytes(*used))).collect();
        let (free, total) = (bytes(g.memory_free), bytes(g.memory));
        let found = format!("GPU {i}: {free} free of {total}, used by {}", processes.join(", "));
        let help = "wait until the other processes end, or exclude the GPU with `cluster.exclude`";
        Check::warn(NAME, codes::GPU_IN_USE, found, help)
    });
    used.collect()
}
