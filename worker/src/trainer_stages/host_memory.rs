//! Rejects a model whose parameters do not fit into the memory of this machine, before memory for
//! them is requested. A failed request would abort the process.
use crate::{
    error::Result,
    params::ParamUnit,
    zero::{ShardingPolicy, param_dtypes::ParamDtypes},
};
use diagnostic::{Diagnostic, codes::host, quantity::format_bytes};

/// Fails if the parameters that this rank stores for forward and backward passes need more bytes
/// than this machine has, including swap space. `world` is the number of ranks. Succeeds if the
/// memory of the machine is unknown.
pub(super) fn check_parameters_fit(
    units: &[ParamUnit],
    policy: ShardingPolicy,
    world: usize,
    weights: ParamDtypes,
) -> Result<()> {
    let elements: u128 = units.iter().map(|unit| unit.len() as u128).sum();
    let stored = if policy.shard_parameters { elements / world as u128 } else { elements };
    let required = stored * weights.compute.size() as u128;
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    check_bytes_fit(required, sum_memory_bytes(&meminfo))
}

/// Fails if the parameters of a rank need more than `available` bytes. An `available` of 0 means
/// that the memory of the machine is unknown.
fn check_bytes_fit(required: u128, available: u64) -> Result<()> {
    if available == 0 || required <= available.into() {
        return Ok(());
    }
    let required = u64::try_from(required).unwrap_or(u64::MAX);
    let (needed, installed) = (format_bytes(required), format_bytes(available));
    let message = format!("the parameters of a rank need {needed} of memory; this machine has {installed}");
    Err(Diagnostic::error(host::MEMORY_INSUFFICIENT, message)
        .with_subject("train.model")
        .with_field("required_bytes", required)
        .with_field("available_bytes", available)
        .into())
}

/// Returns the bytes of memory and of swap space together, from the text of /proc/meminfo. Returns
/// 0 if the text states neither.
fn sum_memory_bytes(meminfo: &str) -> u64 {
    let totals = meminfo.lines().filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        let kib: u64 = value.trim().strip_suffix(" kB")?.parse().ok()?;
        matches!(name, "MemTotal" | "SwapTotal").then(|| kib.saturating_mul(1024))
    });
    totals.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_must_fit_into_the_memory_of_the_machine() {
        assert!(check_bytes_fit(1 << 30, 1 << 30).is_ok());
        assert!(check_bytes_fit(1 << 30, 0).is_ok(), "unknown");
        for required in [(1 << 30) + 1, u128::MAX] {
            let error = Diagnostic::from(check_bytes_fit(required, 1 << 30).unwrap_err());
            assert_eq!((error.code(), error.subject()), (host::MEMORY_INSUFFICIENT, Some("train.model")));
        }
    }

    #[test]
    fn memory_and_swap_space_are_added() {
        let meminfo = "MemTotal:       16384 kB\nMemFree:    1 kB\nSwapTotal:   8 kB\nHugePages_Total:   0\n";
        assert_eq!(sum_memory_bytes(meminfo), 16392 << 10);
        assert_eq!(sum_memory_bytes(""), 0);
    }
}
