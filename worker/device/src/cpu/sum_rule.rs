//! The order in which the terms of a matmul's sums are added ([`SumRule`]).

/// Number of terms per block when sums of bf16 products are added block by block
/// ([`SumRule::Bf16Blocks`]).
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
