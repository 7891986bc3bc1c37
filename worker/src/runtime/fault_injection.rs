//! Fault injection for tests: kills a worker at a numbered place in the code (fault point), makes
//! it loop endlessly, and counts the places that it has passed.
use crate::error::Result;
use diagnostic::{Diagnostic, codes};
use jobspec::env;
use protocol::control::WorkerInit;

/// The failure that a test requests of one rank by `LAUNCH_FAULT`: to be killed at a numbered place
/// in the code, or to loop endlessly.
enum InjectedFault {
    /// `RANK:N`: the process kills itself at its N-th fault point.
    KilledAt(u64),
    /// `RANK:NAME@N`: the process kills itself at its N-th fault point with this name.
    KilledAtNamed(String, u64),
    /// `RANK:loop@STEPS`: after so many steps, the rank does not return from reading samples.
    LoopsAfter(u64),
}

/// Returns the failure that a test requests of this rank by the variable `LAUNCH_FAULT`, if any.
fn read_injected_fault(init: &WorkerInit) -> Result<Option<InjectedFault>> {
    let Some(value) = std::env::var_os(env::LAUNCH_FAULT) else { return Ok(None) };
    let parse_fault = |text: &str| match text.split_once('@') {
        Some(("loop", steps)) => Some(InjectedFault::LoopsAfter(steps.parse().ok()?)),
        Some((name, n)) => Some(InjectedFault::KilledAtNamed(name.to_owned(), n.parse().ok()?)),
        None => Some(InjectedFault::KilledAt(text.parse().ok()?)),
    };
    let parsed = value
        .to_str()
        .and_then(|v| v.split_once(':'))
        .and_then(|(rank, fault)| Some((rank.parse::<u32>().ok()?, parse_fault(fault)?)));
    let (rank, fault) = parsed.ok_or_else(|| {
        let message = format!(
            "{}={value:?} is not of the form RANK:N, RANK:NAME@N or RANK:loop@STEPS",
            env::LAUNCH_FAULT
        );
        Diagnostic::error(codes::training::FAULT_INJECTION_INVALID, message).with_subject(env::LAUNCH_FAULT)
    })?;
    Ok((rank == init.rank).then_some(fault))
}

/// Makes this process kill itself at a numbered place in the code (fault point) if the test
/// variable `LAUNCH_FAULT` requests it.
pub(super) fn arm_requested_fault_point(init: &WorkerInit) -> Result<()> {
    match read_injected_fault(init)? {
        Some(InjectedFault::KilledAt(n)) => ckpt::fault_points::arm_fault_points(n),
        Some(InjectedFault::KilledAtNamed(name, n)) => ckpt::fault_points::arm_named_fault_point(&name, n),
        Some(InjectedFault::LoopsAfter(_)) | None => {}
    }
    Ok(())
}

/// Returns the number of steps after which `LAUNCH_FAULT` makes this rank loop endlessly while
/// reading samples, or `None` without this fault.
pub(super) fn read_endless_loop_step(init: &WorkerInit) -> Result<Option<u64>> {
    match read_injected_fault(init)? {
        Some(InjectedFault::LoopsAfter(steps)) => Ok(Some(steps)),
        _ => Ok(None),
    }
}

/// Appends this rank's number and its count of passed fault points (places where a test can kill
/// the process) to the file that the variable `LAUNCH_FAULT_COUNT` names.
pub(super) fn append_passed_fault_points(init: &WorkerInit) {
    let Some(path) = std::env::var_os(env::LAUNCH_FAULT_COUNT) else { return };
    let line = format!("{} {}\n", init.rank, ckpt::fault_points::count_passed_points());
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    // A test that cannot read the file fails by itself.
    let _ = file.and_then(|mut f| std::io::Write::write_all(&mut f, line.as_bytes()));
}
