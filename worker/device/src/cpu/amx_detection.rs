//! Detects AMX, and asks the kernel for permission to use it.
use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Number of the system call `arch_prctl`.
const SYS_ARCH_PRCTL: i64 = 158;
/// Function of `arch_prctl` that permits this process to use a part of the CPU's state.
const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
/// The part of the CPU's state that consists of AMX's tiles.
const XFEATURE_XTILEDATA: i64 = 18;
/// Bits of EDX of leaf 7 of `cpuid`: AMX with bf16, and tiles.
const CPUID_AMX_BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;

/// Returns true if this machine has AMX for bf16, and the kernel permits this process to use it.
/// The kernel is asked once per process.
pub(crate) fn is_available() -> bool {
    static IS_AVAILABLE: OnceLock<bool> = OnceLock::new();
    *IS_AVAILABLE.get_or_init(|| {
        super::x86::has_avx512()
            && __cpuid_count(7, 0).edx & CPUID_AMX_BF16_AND_TILE == CPUID_AMX_BF16_AND_TILE
            && request_permission()
    })
}

/// Asks the kernel for permission to use tiles in this process. Returns true if it is granted.
fn request_permission() -> bool {
    let result: i64;
    // SAFETY: this function of the system call accesses no memory of the process.
    unsafe {
        asm!("syscall", inlateout("rax") SYS_ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA, out("rcx") _, out("r11") _, options(nostack));
    }
    result == 0
}
