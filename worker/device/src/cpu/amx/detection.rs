//! [`detect`]: finds out whether the CPU, the operating system and the hypervisor allow this
//! process to use AMX, and whether AMX computes correctly.
//!
//! The CPU, the operating system and the hypervisor must support AMX, and the kernel must permit
//! its use to the process. The permission holds for all threads. Results are also compared with the
//! rule of bf16 matmuls once, because wrong results would spoil a training without any error.
use super::self_check::gives_right_results;
use crate::cpu::x86;
use std::arch::{asm, x86_64::__cpuid_count};
use std::sync::OnceLock;

/// Result of the check for AMX: usable, missing, or unusable because of wrong results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AmxSupport {
    /// The CPU, the hypervisor or the kernel does not support AMX for bf16.
    Missing,
    /// The AMX instructions can be executed, but their results are wrong.
    Wrong,
    /// AMX can be used.
    Usable,
}

/// Checks whether this process can use AMX: AMX is present and permitted by the kernel (or emulated
/// in a test), and gives right results. On the first call, asks the kernel for the permission, and
/// compares results of the instructions with the rule.
///
/// The AMX instructions are executed only if this machine has them, or if the library that emulates
/// them for tests is loaded.
pub(crate) fn detect() -> AmxSupport {
    static MACHINE_HAS_AMX: OnceLock<bool> = OnceLock::new();
    static IS_RIGHT: OnceLock<bool> = OnceLock::new();
    let has_amx = || *MACHINE_HAS_AMX.get_or_init(|| cpu_and_system_have_amx() && request_permission());
    // Packing and the conversion of results use AVX-512, which all CPUs with AMX have.
    if !x86::has_avx512() || !(emulator_is_loaded() || has_amx()) {
        return AmxSupport::Missing;
    }
    // SAFETY: AMX instructions can be executed.
    match *IS_RIGHT.get_or_init(|| unsafe { gives_right_results() }) {
        true => AmxSupport::Usable,
        false => AmxSupport::Wrong,
    }
}

/// Bits of register EDX of CPUID's leaf 7 that a CPU with AMX for bf16 sets: AMX-BF16 and AMX-TILE.
const CPUID_AMX_BITS: u32 = 1 << 22 | 1 << 24;
/// Bits of the register XCR0 which show that the operating system saves the AMX tiles and their
/// configuration when it switches threads.
const XCR0_TILE_BITS: u32 = 1 << 17 | 1 << 18;

/// Returns true if CPUID reports AMX for bf16, and the operating system saves the AMX registers.
/// This machine must have AVX-512.
fn cpu_and_system_have_amx() -> bool {
    let features = __cpuid_count(7, 0);
    let (xcr0, _high): (u32, u32);
    // SAFETY: XGETBV is available where the operating system supports AVX-512.
    unsafe {
        asm!("xgetbv", in("ecx") 0u32, out("eax") xcr0, out("edx") _high, options(nomem, nostack, preserves_flags));
    }
    features.edx & CPUID_AMX_BITS == CPUID_AMX_BITS && xcr0 & XCR0_TILE_BITS == XCR0_TILE_BITS
}

/// Number of the system call arch_prctl of Linux.
const SYS_ARCH_PRCTL: i64 = 158;
/// The function of the system call arch_prctl with which a process asks for the permission to use
/// large registers.
const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
/// Number of the AMX tile data in the list of large registers for which a process asks Linux for
/// permission.
const XFEATURE_TILE_DATA: u64 = 18;

/// Asks the Linux kernel for permission to use the AMX tile registers in all threads of this
/// process. Returns whether the kernel granted it. A kernel before 5.16 does not.
fn request_permission() -> bool {
    if !cfg!(target_os = "linux") {
        return false;
    }
    let result: i64;
    // SAFETY: the system call reads and writes no memory of the process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Returns true if the library that emulates AMX instructions for tests
/// (`worker/device/tests/emulated_amx`) is loaded in this process. It handles the signal that the
/// instructions raise. No other library defines the symbol.
fn emulator_is_loaded() -> bool {
    let this_process = libloading::os::unix::Library::this();
    // SAFETY: the library declares the function with this type. It is never unloaded.
    unsafe {
        let is_active = this_process.get::<unsafe extern "C" fn() -> i32>(b"launch_emulated_amx\0");
        is_active.is_ok_and(|is_active| is_active() == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::instruction_set::InstructionSet;

    /// AMX instructions would end this process on a machine that lacks them. `/proc/cpuinfo` is the
    /// kernel's own view of the CPU.
    #[test]
    fn amx_is_used_only_where_the_kernel_lists_it() {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
        let kernel_lists_amx = ["amx_bf16", "amx_tile"].iter().all(|f| flags.split(' ').any(|x| x == *f));
        assert!(!emulator_is_loaded());
        let is_listed = InstructionSet::list_available().contains(&InstructionSet::Amx);
        assert_eq!(is_listed, detect() == AmxSupport::Usable);
        if !kernel_lists_amx {
            assert_eq!(detect(), AmxSupport::Missing);
        }
    }
}
