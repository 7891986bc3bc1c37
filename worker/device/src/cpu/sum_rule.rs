//! The order in which the terms of a matmul's sums are added ([`SumRule`]).
use super::elements::{HalfFormat, InputElements};
use super::flush_denormals::FlushDenormals;
use super::simd::Simd;

/// Number of terms in a block of a sum with [`SumRule::Bf16Blocks`].
pub(crate) const BF16_BLOCK_LEN: usize = 32;

/// The order in which the terms of each sum of a matmul are added, and how the operations round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SumRule {
    /// One chain of fused multiply-adds from zero over a pass of the depth, in rising order, which
    /// is then added to the result of the passes before. Used unless both operands are bf16.
    OneChain,
    /// The rule of Intel's instruction TDPBF16PS, for products of two bf16 numbers
    /// (docs/numerics.md). The sum is divided into blocks of 32 terms; missing terms of the last
    /// block are 0·0. For each block, two chains of fused multiply-adds start from +0: one over the
    /// terms with even index, and one over those with odd index, in rising order. Both are added,
    /// and their sum is added to the result. All operations flush subnormal numbers to zero.
    Bf16Blocks,
}

impl SumRule {
    /// Returns the rule for a matmul of these operands.
    pub(crate) fn for_operands(a: &InputElements, b: &InputElements) -> SumRule {
        match (a, b) {
            (InputElements::Half(HalfFormat::Bf16, _), InputElements::Half(HalfFormat::Bf16, _)) => {
                SumRule::Bf16Blocks
            }
            _ => SumRule::OneChain,
        }
    }

    /// Switches this thread to the mode of the CPU, if there is one, in which the micro-kernel
    /// flushes subnormal numbers as the rule requires. The returned value, if any, must exist while
    /// the micro-kernel runs.
    #[inline(always)]
    pub(crate) fn prepare_thread<S: Simd>(self, _: S) -> Option<FlushDenormals> {
        (self == SumRule::Bf16Blocks && S::USES_FLUSH_MODE).then(FlushDenormals::enable)
    }
}
