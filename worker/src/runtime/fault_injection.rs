//! Fault injection for tests: kills a worker at a chosen point of its run, and counts the points
//! that it passed.
use crate::error::Result;
use diagnostic::{Diagnostic, codes};
use jobspec::env;
use protocol::control::WorkerInit;

/// Makes this process kill itself at its N-th fault point if the test variable
/// `LAUNCH_FAULT=RANK:N` names its rank.
pub(super) fn arm_fault_point(init: &WorkerInit) -> Result<()> {
    let Some(value) = std::env::var_os(env::LAUNCH_FAULT) else { return Ok(()) };
    let parsed = value
        .to_str()
        .and_then(|v| v.split_once(':'))
        .and_then(|(rank, n)| Some((rank.parse::<u32>().ok()?, n.parse().ok()?)));
    let (rank, n) = parsed.ok_or_else(|| {
        let message = format!("{}={value:?} is not of the form RANK:N", env::LAUNCH_FAULT);
        Diagnostic::error(codes::training::FAULT_INJECTION_INVALID, message).with_subject(env::LAUNCH_FAULT)
    })?;
    if rank == init.rank {
        ckpt::fault_points::arm_fault_points(n);
    }
    Ok(())
}

/// Appends this rank and the number of fault points that it passed to the file that the test
/// variable `LAUNCH_FAULT_COUNT` names.
pub(super) fn record_fault_points(init: &WorkerInit) {
    let Some(path) = std::env::var_os(env::LAUNCH_FAULT_COUNT) else { return };
    let line = format!("{} {}\n", init.rank, ckpt::fault_points::count_passed_points());
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    // A test that cannot read the file fails by itself.
    let _ = file.and_then(|mut f| std::io::Write::write_all(&mut f, line.as_bytes()));
}
