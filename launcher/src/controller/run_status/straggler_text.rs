//! Describes slow ranks in messages to the user.
use protocol::{
    event::{StragglerReason, StragglerReport, StragglerState},
    straggler::StragglerKind,
};

/// Describes a slow rank, and the likely reason of the slowness, in one line.
pub(super) fn describe_straggler(report: &StragglerReport) -> String {
    let rank = match report.host.is_empty() {
        true => format!("rank {}", report.rank),
        false => format!("rank {} ({})", report.rank, report.host),
    };
    let subject = match report.kind {
        StragglerKind::Work => rank,
        StragglerKind::Network => format!("the network of {rank}"),
    };
    if report.state == StragglerState::Recovered {
        return format!("{subject} no longer slows down the other ranks");
    }
    let percent = format_percent(report.share);
    let effect = match report.step_s {
        Some(step_s) => {
            format!("{subject} slows down all ranks: it costs {percent} of the step time of {step_s:.2} s")
        }
        None => format!("{subject} waits for CPUs for {percent} of the time longer than the other ranks"),
    };
    match report.reason.as_ref().and_then(describe_slowness_reason) {
        Some(reason) => format!("{effect}; {reason}"),
        None => effect,
    }
}

/// Describes the likely reason why a rank is slow, such as a CPU quota, as text. Returns `None` if
/// the description of the rank includes the reason.
fn describe_slowness_reason(reason: &StragglerReason) -> Option<String> {
    Some(match reason {
        StragglerReason::CpuQuota { share } => {
            let percent = format_percent(*share);
            format!("the CPU quota of its control group stops it for {percent} of the time")
        }
        StragglerReason::CpuContention { share } => {
            format!(
                "its threads wait for CPUs, {share:.2} of them on average, because other processes run there"
            )
        }
        StragglerReason::PageFaults { per_second } => {
            format!("it reads {per_second:.0} pages per second from a disk (major page faults)")
        }
        StragglerReason::GpuClocks { gpu, reason } => {
            format!("the clocks of GPU {gpu} of its host are reduced: {reason}")
        }
        StragglerReason::GpuMemoryErrors { gpu, errors } => {
            format!("GPU {gpu} of its host has had {errors} uncorrected memory errors")
        }
        StragglerReason::Stopped => "a signal has stopped its process".to_owned(),
        StragglerReason::SlowLink | StragglerReason::Unknown => return None,
    })
}

/// Formats a share from 0 to 1 as a percentage.
fn format_percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}
