//! Detects which vector instructions this machine has, and compiles the kernels of the CPU backend
//! for each set of instructions ([`InstructionSet`]).
#[cfg(target_arch = "x86_64")]
use super::{amx, x86};

/// Error: the instruction set that a caller chose for a [`super::Cpu`] does not exist, or this
/// machine does not support it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not an instruction set of this machine; it has: {}", available.join(", "))]
pub struct InstructionSetUnavailable {
    /// The name of the requested instruction set.
    pub name: String,
    /// The names of the instruction sets that this machine supports, best first.
    pub available: Vec<&'static str>,
}

/// A set of vector instructions that this machine supports and for which the CPU's kernels are
/// compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstructionSet {
    /// AMX for matmuls of bf16, and AVX-512 for everything else.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The baseline instructions of the compilation target.
    Portable,
}

impl InstructionSet {
    /// Returns the best instruction set (AMX, AVX-512, AVX2 or the baseline) that this machine
    /// supports.
    pub(crate) fn detect() -> Self {
        Self::list_available()[0]
    }

    /// Returns the instruction sets that this machine supports, best first.
    pub(crate) fn list_available() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if amx::detect() == amx::AmxSupport::Usable {
                sets.push(InstructionSet::Amx);
            }
            if x86::has_avx512() {
                sets.push(InstructionSet::Avx512);
            }
            if x86::has_avx2() {
                sets.push(InstructionSet::Avx2);
            }
        }
        sets.push(InstructionSet::Portable);
        sets
    }

    /// Returns the instruction set whose name is `name` ([`Self::option_name`]).
    ///
    /// # Errors
    ///
    /// Fails if the name is unknown or this machine does not support the instruction set.
    pub(crate) fn find(name: &str) -> Result<Self, InstructionSetUnavailable> {
        let sets = Self::list_available();
        sets.iter().copied().find(|set| set.option_name() == name).ok_or_else(|| InstructionSetUnavailable {
            name: name.into(),
            available: sets.iter().map(|set| set.option_name()).collect(),
        })
    }

    /// Returns the name by which users select the instruction set. It does not depend on the
    /// architecture for the baseline.
    fn option_name(self) -> &'static str {
        match self {
            InstructionSet::Portable => "scalar",
            #[cfg(target_arch = "x86_64")]
            _ => self.name(),
        }
    }

    /// Returns a sentence for a warning if AMX computes wrong results on this machine and is
    /// therefore not used, and `None` otherwise.
    pub(crate) fn describe_rejected() -> Option<&'static str> {
        #[cfg(target_arch = "x86_64")]
        if amx::detect() == amx::AmxSupport::Wrong {
            return Some(
                "AMX is not used, because its results on this machine are wrong (an error of the CPU or the \
                 hypervisor): bf16 matmuls are slower",
            );
        }
        None
    }

    /// Returns the name of the instruction set for the log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Amx => "amx",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => "avx2",
            InstructionSet::Portable if cfg!(target_arch = "aarch64") => "neon",
            InstructionSet::Portable => "baseline",
        }
    }
}

/// Defines a function that takes an instruction set, such as AVX-512, and calls a kernel compiled
/// for this instruction set.
///
/// `multiversion! { fn name = body(arg: Type, …) -> Result }` defines `name(instruction_set, arg,
/// …)`, which calls `#[inline(always)] fn body<S: Simd>(s: S, arg: Type, …)`, compiled for the
/// instruction set.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)?) => {
        $(#[$doc])*
        $vis fn $name(instruction_set: $crate::cpu::instruction_set::InstructionSet, $($arg: $ty),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $out)? {
                // SAFETY: only machines with these features call this function.
                $body(unsafe { $crate::cpu::x86::Avx512::assume_supported() }, $($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $out)? {
                // SAFETY: only machines with these features call this function.
                $body(unsafe { $crate::cpu::x86::Avx2::assume_supported() }, $($arg),*)
            }
            match instruction_set {
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::instruction_set::InstructionSet::Amx
                | $crate::cpu::instruction_set::InstructionSet::Avx512 => {
                    // SAFETY: an InstructionSet exists only on machines that have it.
                    unsafe { avx512($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an InstructionSet exists only on machines that have it.
                $crate::cpu::instruction_set::InstructionSet::Avx2 => unsafe { avx2($($arg),*) },
                $crate::cpu::instruction_set::InstructionSet::Portable => $body($crate::cpu::portable::Portable, $($arg),*),
            }
        }
    };
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_are_found_by_name_and_unknown_ones_are_rejected() {
        for set in InstructionSet::list_available() {
            assert_eq!(InstructionSet::find(set.option_name()), Ok(set));
        }
        assert_eq!(InstructionSet::find("scalar"), Ok(InstructionSet::Portable));
        let error = InstructionSet::find("avx1024").expect_err("an unknown name");
        assert_eq!((&error.name[..], error.available.last()), ("avx1024", Some(&"scalar")));
    }
}
