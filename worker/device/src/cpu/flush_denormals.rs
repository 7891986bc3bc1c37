//! [`FlushDenormals`]: switches the vector instructions of a thread to a mode in which subnormal
//! numbers count as zero.

/// Guard during whose lifetime the x86 vector instructions of this thread treat subnormal inputs
/// and results as zero (MXCSR flags DAZ and FTZ). Dropping it restores the register, also while a
/// panic unwinds.
///
/// On other architectures, the rule is computed by methods of [`super::simd::Simd`] that flush
/// explicitly, and this type does nothing.
///
/// The compiler assumes that the flags are clear. A value may therefore exist only around calls of
/// kernels that read all their operands from memory and write all their results to memory. The
/// changes of the register are barriers for memory accesses, so that such computations stay between
/// them.
pub(crate) struct FlushDenormals {
    #[cfg(target_arch = "x86_64")]
    saved: u32,
    /// The register belongs to the thread, so a value must not move to another one.
    _of_this_thread: core::marker::PhantomData<*const ()>,
}

/// The flags DAZ and FTZ of the register MXCSR.
#[cfg(target_arch = "x86_64")]
const DAZ_AND_FTZ: u32 = 1 << 6 | 1 << 15;

impl FlushDenormals {
    /// Makes the vector instructions of this thread treat subnormal numbers as zero until the
    /// returned guard is dropped.
    #[inline(always)]
    pub(crate) fn enable() -> Self {
        #[cfg(target_arch = "x86_64")]
        let saved = {
            let saved = read_mxcsr();
            write_mxcsr(saved | DAZ_AND_FTZ);
            saved
        };
        FlushDenormals {
            #[cfg(target_arch = "x86_64")]
            saved,
            _of_this_thread: core::marker::PhantomData,
        }
    }
}

impl Drop for FlushDenormals {
    #[inline(always)]
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        write_mxcsr(self.saved);
    }
}

/// Returns the value of the register MXCSR: flags and masks of floating-point arithmetic with
/// vector instructions.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn read_mxcsr() -> u32 {
    let mut value = 0u32;
    // SAFETY: the instruction writes 4 bytes at the given address.
    unsafe { core::arch::asm!("stmxcsr [{}]", in(reg) &mut value, options(nostack, preserves_flags)) };
    value
}

/// Sets the register MXCSR.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn write_mxcsr(value: u32) {
    // SAFETY: the instruction reads 4 bytes at the given address. The value is one that was read
    // from the register, or such a value with DAZ and FTZ set, so it is valid. See `FlushDenormals`
    // for the computations that run with these flags.
    unsafe { core::arch::asm!("ldmxcsr [{}]", in(reg) &value, options(nostack, preserves_flags)) };
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn the_register_is_restored_also_after_a_panic() {
        let before = read_mxcsr();
        assert_eq!(before & DAZ_AND_FTZ, 0);
        let guard = FlushDenormals::enable();
        assert_eq!(read_mxcsr() & DAZ_AND_FTZ, DAZ_AND_FTZ);
        drop(guard);
        assert_eq!(read_mxcsr(), before);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _guard = FlushDenormals::enable();
            panic!("in a kernel");
        }));
        assert!(outcome.is_err());
        assert_eq!(read_mxcsr(), before);
    }
}
