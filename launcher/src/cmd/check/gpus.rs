//! [`check_gpus`]: performs the checks of `launch check` that concern the GPUs of a host.
use super::check_report::CheckResult;
use diagnostic::{Diagnostic, codes::host as codes, quantity::format_bytes};
use protocol::probe::{GpuReport, HostInspection, LibraryReport};

/// Checks number, driver, libraries, memory, health and links of a host's GPUs.
///
/// Number and versions are compared with those of `first`, the first host that answered. `slots` is
/// the number of slots that the hostfile declares for the host.
pub(super) fn check_gpus(
    host: &HostInspection,
    first: &HostInspection,
    slots: Option<u32>,
) -> Vec<CheckResult> {
    let (gpus, first_gpus) = (&host.gpus, &first.gpus);
    let mut checks = vec![check_gpu_count(gpus, first, slots)];
    if let Some(driver) = &gpus.driver {
        checks.push(match first_gpus.driver.as_ref().filter(|other| *other != driver) {
            Some(other) => CheckResult::warn(
                "driver",
                codes::LIBRARY_VERSION_DIFFERS,
                format!("{driver}, {} has {other}", first.hostname),
                "install the same driver on all hosts",
            ),
            None => CheckResult::ok("driver", driver.clone()),
        });
    }
    match gpus.libraries.is_empty() {
        true => checks.push(check_nccl_version(gpus, first)),
        false => checks.extend(check_cuda_libraries(gpus, first)),
    }
    checks.extend(check_gpus_not_in_use(gpus));
    checks.extend(check_gpu_health(gpus));
    checks.extend(check_gpu_links(gpus));
    checks
}

/// Warns if a host has fewer GPUs than slots (workers), or another number of GPUs than the first
/// host that answered `launch check`. Also warns if the GPU driver does not work.
fn check_gpu_count(gpus: &GpuReport, first: &HostInspection, slots: Option<u32>) -> CheckResult {
    /// The name that the check of the number of GPUs has in the report of `launch check`.
    const CHECK_NAME: &str = "gpus";
    let (count, first_count) = (gpus.gpus.len() as u32, first.gpus.gpus.len());
    let model = gpus.gpus.first().map_or("", |g| g.name.as_str());
    match (&gpus.error, slots) {
        (Some(error), _) => CheckResult::warn(
            CHECK_NAME,
            codes::GPU_DRIVER_UNUSABLE,
            format!("{} devices, but {error}", gpus.devices),
            "run `nvidia-smi` on the host",
        ),
        (None, Some(slots)) if count > 0 && slots > count => {
            let found = format!("{count} found, but the hostfile declares {slots} slots");
            let help = "correct the slots; ranks share GPUs, unless the job computes on CPUs";
            CheckResult::warn(CHECK_NAME, codes::GPUS_FEWER_THAN_SLOTS, found, help)
        }
        (None, _) if count as usize != first_count => CheckResult::warn(
            CHECK_NAME,
            codes::GPU_COUNT_DIFFERS,
            format!("{count}, {} has {first_count}", first.hostname),
            "look for a missing GPU with `nvidia-smi`",
        ),
        (None, _) if count == 0 => CheckResult::ok(CHECK_NAME, "none"),
        (None, _) => CheckResult::ok(CHECK_NAME, format!("{count} × {model}")),
    }
}

/// Warns if the NCCL library that the dynamic loader finds has another version than on `first`, the
/// first host that answered. A host without NCCL passes.
fn check_nccl_version(gpus: &GpuReport, first: &HostInspection) -> CheckResult {
    match (&gpus.nccl, &first.gpus.nccl) {
        (Some((_, version)), Some((_, other))) if version != other => CheckResult::warn(
            "nccl",
            codes::LIBRARY_VERSION_DIFFERS,
            format!("{version}, {} has {other}", first.hostname),
            "install the same NCCL on all hosts",
        ),
        (Some((path, version)), _) => CheckResult::ok("nccl", format!("{version} ({path})")),
        (None, _) => CheckResult::ok("nccl", "not found by the loader (programs may contain it)"),
    }
}

/// Checks the CUDA libraries that built-in training loads, with one result for each library.
///
/// A required library that cannot be loaded is a failure. Another version than on `first`, the
/// first host that answered, is a warning.
fn check_cuda_libraries(gpus: &GpuReport, first: &HostInspection) -> Vec<CheckResult> {
    /// The name that the check of the CUDA libraries has in the report of `launch check`.
    const CHECK_NAME: &str = "cuda";
    let first_version = |name: &str| {
        let library = first.gpus.libraries.iter().find(|library| library.name == name)?;
        library.result.as_ref().ok().map(|(version, _)| version.as_str())
    };
    let check = |LibraryReport { name, required, result }: &LibraryReport| match result {
        Ok((version, path)) => match first_version(name).filter(|other| other != version) {
            Some(other) => CheckResult::warn(
                CHECK_NAME,
                codes::LIBRARY_VERSION_DIFFERS,
                format!("{name} {version}, {} has {other}", first.hostname),
                "install the same version on all hosts",
            ),
            None => CheckResult::ok(CHECK_NAME, format!("{name} {version} ({})", path.display())),
        },
        Err(_) if name == "cuDNN" => CheckResult::ok(CHECK_NAME, "no cuDNN; attention uses launch's kernels"),
        Err(error) if *required => CheckResult::failed(
            CHECK_NAME,
            codes::CUDA_LIBRARY_MISSING,
            format!("{name}: {error}"),
            join_help_texts(
                error,
                "install the library, or name its directory in `cluster.cuda_library_paths`",
            ),
        ),
        Err(error) => CheckResult::warn(
            CHECK_NAME,
            codes::NCCL_MISSING,
            format!("{name}: {error}"),
            "only workers with a GPU each need it; otherwise collectives use host memory \
             (`cluster.comm_backend`)",
        ),
    };
    gpus.libraries.iter().map(check).collect()
}

/// Joins the help texts of the error `error` and the text `advice` with semicolons into one help
/// text.
fn join_help_texts(error: &Diagnostic, advice: &str) -> String {
    let help = error.help().iter().map(String::as_str).chain([advice]);
    help.collect::<Vec<_>>().join("; ")
}

/// Checks each GPU of a host for memory errors, throttled clocks, and modes that prevent or limit
/// the use of the GPU by ranks. Returns one warning for each problem, or one passed check if the
/// GPUs have no problem. Returns no checks for a host without GPUs.
fn check_gpu_health(gpus: &GpuReport) -> Vec<CheckResult> {
    /// The name that the check of memory errors, clocks and modes of GPUs has in the report of
    /// `launch check`.
    const CHECK_NAME: &str = "gpu health";
    let mut checks = Vec::new();
    for (index, gpu) in gpus.gpus.iter().enumerate() {
        let mut warn = |code, found: String, help: &str| {
            checks.push(CheckResult::warn(
                CHECK_NAME,
                code,
                format!("GPU {index} ({}): {found}", gpu.pci_address),
                help,
            ));
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
        checks.push(CheckResult::ok(CHECK_NAME, found));
    }
    checks
}

/// Warns if GPUs of a host cannot access each other's memory, or have different numbers of active
/// NVLinks. Returns `None` if the host has fewer than two GPUs.
fn check_gpu_links(gpus: &GpuReport) -> Option<CheckResult> {
    /// The name that the check of peer access and NVLinks between GPUs has in the report of `launch
    /// check`.
    const CHECK_NAME: &str = "gpu links";
    let (first, _) = (gpus.gpus.first()?, gpus.gpus.get(1)?);
    // Every pair of GPUs is listed once, under the lower index.
    let pairs = gpus.gpus.iter().enumerate().flat_map(|(index, gpu)| {
        let above = gpu.no_peer_access.iter().filter(move |(other, _)| *other as usize > index);
        above.map(move |(other, reason)| format!("{index} and {other} ({reason})"))
    });
    let pairs: Vec<String> = pairs.collect();
    let links: Vec<u32> = gpus.gpus.iter().map(|gpu| gpu.nvlinks).collect();
    Some(if !pairs.is_empty() {
        let found = format!("no direct access between GPUs {}", pairs.join(", "));
        let help = "check whether an IOMMU or PCIe ACS is enabled; NCCL transfers through host memory";
        CheckResult::warn(CHECK_NAME, codes::GPU_PEER_ACCESS_MISSING, found, help)
    } else if links.iter().any(|n| *n != first.nvlinks) {
        let found = format!("active NVLinks by GPU: {links:?}");
        let help = "links are down: run `nvidia-smi nvlink --status` and `dmesg | grep Xid`";
        CheckResult::warn(CHECK_NAME, codes::GPU_LINK_DOWN, found, help)
    } else if first.nvlinks > 0 {
        CheckResult::ok(CHECK_NAME, format!("{} NVLinks each", first.nvlinks))
    } else {
        CheckResult::ok(CHECK_NAME, "direct access over PCIe")
    })
}

/// Warns if processes already use GPUs of a host. Returns one warning for each GPU in use. If no
/// GPU is in use, returns one passed check with the free memory of the fullest GPU.
fn check_gpus_not_in_use(gpus: &GpuReport) -> Vec<CheckResult> {
    /// The name that the check for processes that already use GPUs has in the report of `launch
    /// check`.
    const CHECK_NAME: &str = "gpu memory";
    let fullest = gpus.gpus.iter().min_by_key(|g| g.memory_free);
    if let Some(gpu) = fullest.filter(|_| gpus.gpus.iter().all(|g| g.processes.is_empty())) {
        let found =
            format!("at least {} free of {}", format_bytes(gpu.memory_free), format_bytes(gpu.memory));
        return vec![CheckResult::ok(CHECK_NAME, found)];
    }
    let used = gpus.gpus.iter().enumerate().filter(|(_, g)| !g.processes.is_empty()).map(|(i, g)| {
        let processes: Vec<String> =
            g.processes.iter().map(|(pid, used)| format!("{pid} ({})", format_bytes(*used))).collect();
        let (free, total) = (format_bytes(g.memory_free), format_bytes(g.memory));
        let found = format!("GPU {i}: {free} free of {total}, used by {}", processes.join(", "));
        let help = "wait until the other processes end, or exclude the GPU with `cluster.exclude`";
        CheckResult::warn(CHECK_NAME, codes::GPU_IN_USE, found, help)
    });
    used.collect()
}
