//! The system calls that the seccomp filters allow a sandbox process.
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

/// System calls that a sandbox process may use with any arguments. They open no path and create no
/// process, socket or file.
const ALLOWED_SYSTEM_CALLS: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_sysinfo,
    libc::SYS_write,
    libc::SYS_writev,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// System calls that the seccomp filter answers with the error ENOSYS, as a kernel without these
/// calls does. The C library and std then use older system calls, whose arguments the filter can
/// check.
const ENOSYS_SYSTEM_CALLS: [i64; 2] = [libc::SYS_clone3, libc::SYS_statx];
/// Option of the system call `prctl` by which a memory allocator gives a name to a memory mapping.
const PR_SET_VMA: u64 = 0x5356_4d41;

/// Builds the two seccomp filters that restrict the system calls of a sandbox process, in the order
/// in which they must be installed. For each system call, the kernel takes the strictest answer of
/// both. System calls that no rule allows fail with EPERM.
pub(crate) fn build_seccomp_filters() -> Result<[BpfProgram; 2], BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let argument = |number, expected| {
        let condition = SeccompCondition::new(number, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, expected)?;
        SeccompRule::new(vec![condition])
    };
    let masked = |number, mask: i32| {
        let (mask, length) = (mask as u64, SeccompCmpArgLen::Dword);
        let condition = SeccompCondition::new(number, length, SeccompCmpOp::MaskedEq(mask), mask)?;
        SeccompRule::new(vec![condition])
    };
    // abort() sends SIGABRT to its own thread.
    let this_process =
        SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, std::process::id().into())?;
    let abort = SeccompCondition::new(2, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, libc::SIGABRT as u64)?;
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED_SYSTEM_CALLS.iter().map(|&call| (call, Vec::new())).collect();
    rules.extend(ENOSYS_SYSTEM_CALLS.iter().map(|&call| (call, Vec::new())));
    rules.insert(libc::SYS_clone, vec![masked(0, libc::CLONE_THREAD)?]);
    rules.insert(libc::SYS_prlimit64, vec![argument(0, 0)?]);
    rules.insert(libc::SYS_prctl, vec![argument(0, libc::PR_SET_NAME as u64)?, argument(0, PR_SET_VMA)?]);
    rules.insert(libc::SYS_newfstatat, vec![masked(3, libc::AT_EMPTY_PATH)?]);
    rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![this_process, abort])?]);
    let allow =
        SeccompFilter::new(rules, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow, arch)?;
    let without_missing = SeccompFilter::new(
        ENOSYS_SYSTEM_CALLS.iter().map(|&call| (call, Vec::new())).collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS as u32),
        arch,
    )?;
    Ok([without_missing.try_into()?, allow.try_into()?])
}
