//! The norm of the gradient of all parameters, summed in a fixed order, so that its bits do not
//! depend on the number of ranks.
use super::step::{Trainer, build_invalid_report_error};
use crate::{
    error::Result,
    params::list_tensors_in_canonical_order,
    zero::{micro_batch_sums::sum_in_fixed_order, reduced_gradient::ReducedGradient},
};

impl Trainer {
    /// Computes the sum of squares of each block of elements in this rank's gradients, from which
    /// all ranks together compute the gradient norm.
    pub(super) fn sum_squares_of_gradients(&mut self, gradients: &[ReducedGradient]) -> Result<Vec<f64>> {
        let mut parts = Vec::new();
        for (u, gradient) in gradients.iter().enumerate() {
            let range = self.engine.owned_range(u);
            let (unit, mut at) = (&self.engine.shards[u].unit, 0);
            for seg in unit.list_trained_segments(range) {
                parts.push(gradient.owned.view().slice(at..at + seg.flat.len()));
                at += seg.flat.len();
            }
        }
        let staging = std::mem::take(&mut self.norm_staging);
        let (sums, staging) = self.ops.start_sum_squares_by_block(&parts, staging).wait()?;
        self.norm_staging = staging;
        self.ops.check_status()?;
        Ok(sums)
    }

    /// Computes the L2 norm of the summed gradient of all parameters on all ranks. `blocks` are the
    /// sums of squares of this rank's blocks, which are added in a fixed order.
    ///
    /// Collective: every rank must call it.
    pub(super) fn compute_gradient_norm(&self, blocks: &[f64]) -> Result<f64> {
        let bytes: Vec<u8> = blocks.iter().flat_map(|s| s.to_le_bytes()).collect();
        let gathered = self.engine.queue().run_and_wait(move |c| c.all_gather_bytes(&bytes))?;
        Ok(sum_in_fixed_order(&self.order_block_sums(&gathered)?).sqrt())
    }

    /// Sorts the blocks' sums of squares, which all ranks have computed for the gradient norm, by
    /// tensor, so that the order of addition is always equal. The order does not depend on which
    /// rank has which experts.
    fn order_block_sums(&self, gathered: &[Vec<u8>]) -> Result<Vec<f64>> {
        let mut readers: Vec<_> = gathered.iter().map(|b| b.chunks_exact(8)).collect();
        let units = self.engine.clone_units();
        let mut by_param: Vec<Vec<Vec<f64>>> =
            units.iter().map(|u| vec![Vec::new(); u.params.len()]).collect();
        for (s, sums) in self.engine.shards.iter().zip(&mut by_param) {
            for (rank, reader) in readers.iter_mut().enumerate() {
                for g in s.unit.list_trained_segments(s.partition.shard_range(rank)) {
                    for _ in 0..g.flat.len().div_ceil(device::ops::NORM_BLOCK_LEN) {
                        let word = reader.next().ok_or_else(|| {
                            build_invalid_report_error("a rank reported too few block sums")
                        })?;
                        sums[g.param].push(f64::from_le_bytes(word.try_into().expect("8 bytes")));
                    }
                }
            }
        }
        let ordered = list_tensors_in_canonical_order(&units).into_iter();
        Ok(ordered.flat_map(|(u, i)| std::mem::take(&mut by_param[u][i])).collect())
    }
}
