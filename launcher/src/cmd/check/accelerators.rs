//! [`check_accelerators`]: the check of `launch check` that concerns the accelerators (GPUs, NPUs
//! and others) of a host.
use super::check_report::CheckResult;
use diagnostic::{codes::host as codes, quantity::format_count};
use jobspec::{AcceleratorKind, DeviceSelection, JobSpec};
use protocol::{
    hardware::{Accelerator, list_accelerator_kinds},
    probe::HostInspection,
};

/// Checks the number and kind of a host's accelerators, unless this host and the first host have
/// only whole NVIDIA GPUs. Warns if the host has accelerators of several kinds and the job does not
/// choose one, if permissions deny all of them, if the number differs from that of `first`, the
/// first host that answered, or if the hostfile declares more `slots`. Returns no check for other
/// hosts.
pub(super) fn check_accelerators(
    job: &JobSpec,
    host: &HostInspection,
    first: &HostInspection,
    slots: Option<u32>,
) -> Option<CheckResult> {
    /// The name that the check of a host's accelerators has in the report of `launch check`.
    const CHECK_NAME: &str = "accelerators";
    let kinds = list_accelerator_kinds(&host.accelerators);
    let found = describe_accelerators(&host.accelerators);
    let only_nvidia_gpus = kinds.iter().all(|kind| *kind == AcceleratorKind::Cuda);
    if kinds.is_empty() && host.denied_accelerators > 0 {
        let found = format!("{} denied to launch", format_count(host.denied_accelerators, "device"));
        let help = "add the user to the groups of the device nodes in /dev, or request devices from the \
                    scheduler";
        return Some(CheckResult::warn(CHECK_NAME, codes::ACCELERATORS_DENIED, found, help));
    }
    if only_nvidia_gpus
        && list_accelerator_kinds(&first.accelerators).iter().all(|kind| *kind == AcceleratorKind::Cuda)
    {
        return None;
    }
    let chooses_kind = !matches!(job.cluster.devices, DeviceSelection::Auto | DeviceSelection::List(_));
    let count = host.accelerators.len() as u32;
    let first_found = describe_accelerators(&first.accelerators);
    let whole_gpus = host.gpus.gpus.iter().filter(|gpu| !gpu.mig_enabled).count();
    Some(if kinds.contains(&AcceleratorKind::Mig) && whole_gpus > 0 {
        let gpus = format_count(whole_gpus, "GPU");
        let found = format!("{found}; {gpus} without MIG cannot be used next to them");
        let help = "partition all GPUs of the host or none, or list the whole GPUs in CUDA_VISIBLE_DEVICES";
        CheckResult::warn(CHECK_NAME, codes::ACCELERATORS_MIXED, found, help)
    } else if kinds.len() > 1 && !chooses_kind {
        let help = "choose a kind with `cluster.devices`";
        CheckResult::warn(CHECK_NAME, codes::ACCELERATORS_MIXED, found, help)
    } else if found != first_found {
        let found = format!("{found}, {} has {first_found}", first.hostname);
        CheckResult::warn(
            CHECK_NAME,
            codes::GPU_COUNT_DIFFERS,
            found,
            "look for a missing device on the host",
        )
    } else if let Some(slots) = slots.filter(|slots| *slots > count && count > 0) {
        let found = format!("{found}, but the hostfile declares {slots} slots");
        let help = "correct the slots; ranks share devices, unless the job computes on CPUs";
        CheckResult::warn(CHECK_NAME, codes::GPUS_FEWER_THAN_SLOTS, found, help)
    } else {
        CheckResult::ok(CHECK_NAME, found)
    })
}

/// Describes accelerators by number and kind, such as `8 NPUs (Ascend)`, or as `none`.
pub(super) fn describe_accelerators(accelerators: &[Accelerator]) -> String {
    let describe = |kind: AcceleratorKind| {
        let count = accelerators.iter().filter(|a| a.kind == kind).count();
        let traits = kind.traits();
        format!("{} ({})", format_count(count, traits.unit), traits.vendor)
    };
    match list_accelerator_kinds(accelerators) {
        kinds if kinds.is_empty() => "none".to_owned(),
        kinds => kinds.into_iter().map(describe).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cmd::check::check_report::CheckLevel, testing::sample_job};

    fn inspect(accelerators: &[(AcceleratorKind, usize)]) -> HostInspection {
        let devices = accelerators.iter().flat_map(|(kind, count)| vec![Accelerator::new(*kind); *count]);
        HostInspection { hostname: "a".into(), accelerators: devices.collect(), ..HostInspection::default() }
    }

    #[test]
    fn accelerators_of_each_host_are_compared() {
        use AcceleratorKind::{Cuda, Npu, Xpu};
        let first = inspect(&[(Npu, 8)]);
        let check = |host: &HostInspection, first: &HostInspection, slots| {
            let result = check_accelerators(&sample_job(), host, first, slots)?;
            Some((result.level, result.code, result.found))
        };
        let ok = |found: &str| Some((CheckLevel::Ok, None, found.to_owned()));
        let warning = |code, found: &str| Some((CheckLevel::Warn, Some(code), found.to_owned()));
        assert_eq!(check(&first, &first, Some(8)), ok("8 NPUs (Ascend)"));
        assert_eq!(
            check(&first, &first, Some(9)),
            warning(codes::GPUS_FEWER_THAN_SLOTS, "8 NPUs (Ascend), but the hostfile declares 9 slots")
        );
        assert_eq!(
            check(&inspect(&[]), &first, None),
            warning(codes::GPU_COUNT_DIFFERS, "none, a has 8 NPUs (Ascend)")
        );
        let mixed = inspect(&[(Cuda, 2), (Xpu, 1)]);
        let found = "2 GPUs (NVIDIA), 1 XPU (Intel)";
        assert_eq!(check(&mixed, &mixed, None), warning(codes::ACCELERATORS_MIXED, found));
        let mut job = sample_job();
        job.cluster.devices = DeviceSelection::Cuda;
        assert_eq!(check_accelerators(&job, &mixed, &mixed, None).map(|c| c.level), Some(CheckLevel::Ok));
        let nvidia = inspect(&[(Cuda, 2)]);
        assert_eq!(check(&nvidia, &nvidia, None), None, "GPUs of NVIDIA have separate checks");
        let mut partitioned = inspect(&[(AcceleratorKind::Mig, 2)]);
        let gpu = |mig_enabled| protocol::probe::GpuStatus { mig_enabled, ..Default::default() };
        partitioned.gpus.gpus = vec![gpu(true)];
        assert_eq!(check(&partitioned, &partitioned, None), ok("2 MIG instances (NVIDIA)"));
        partitioned.gpus.gpus.push(gpu(false));
        let found = "2 MIG instances (NVIDIA); 1 GPU without MIG cannot be used next to them";
        assert_eq!(check(&partitioned, &partitioned, None), warning(codes::ACCELERATORS_MIXED, found));
        let denied = HostInspection { denied_accelerators: 4, ..HostInspection::default() };
        let expected = warning(codes::ACCELERATORS_DENIED, "4 devices denied to launch");
        assert_eq!(check(&denied, &denied, None), expected);
    }
}
