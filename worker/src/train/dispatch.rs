//! Expert parallelism: sends rows of token activations to the ranks that have the tokens' experts,
//! and the results back. Exchanges run in the background until they are waited for.
use super::moe::layer_plan::MoeLayerPlan;
use crate::{
    error::{Error, Result},
    expert_layout::{RecvPlan, SendPlan},
    zero::{
        buffer_pool::resize_buffer,
        collective_queue::{CollectiveQueue, PendingCollective},
        engine::ZeroEngine,
    },
};
use device::{Buf, Dtype, Ops, View, ViewMut};
use diagnostic::codes;
use std::{ops::Range, sync::Arc};

/// Which token rows this rank sends to the experts of other ranks, and which it receives for its
/// experts, in one mixture-of-experts layer.
type DispatchPlan<'a> = (&'a SendPlan, &'a RecvPlan);

/// The kind of data that ranks exchange for experts: vectors (activations or gradients), or single
/// numbers (router weights or their gradients).
#[derive(Clone, Copy)]
pub(super) enum ExchangedRowKind {
    /// A vector of the width of the residual stream for each token and expert: inputs, outputs or
    /// gradients.
    Rows,
    /// One `f32` number for each token and expert: the router's factor for the expert's output, or
    /// the gradient of this factor.
    Weights,
}

/// Sends the activations of this rank's tokens, one row per token and chosen expert, to the ranks
/// that have the experts, and receives the results.
pub(super) struct TokenDispatcher {
    ops: Arc<dyn Ops>,
    queue: Arc<CollectiveQueue>,
    world: usize,
    rank: usize,
    /// The ranks of this rank's expert-parallel group.
    pub(super) group: Range<usize>,
    /// The largest number of rows that one rank may send.
    max_rows: usize,
    /// The number of elements of a row.
    width: usize,
    rows: ExpertRowBuffers,
    weights: ExpertRowBuffers,
}

/// The send buffer and the receive buffer for exchanging rows of one kind (activations or router
/// factors) between the ranks of tokens and those of experts. A running exchange owns them.
struct ExpertRowBuffers {
    /// The rows of this rank's tokens, sorted by the rank that has the expert of the row.
    packed: Buf,
    /// The rows for this rank's experts, sorted by the rank that sent them.
    received: Buf,
    pending: Option<PendingCollective<(Buf, Buf)>>,
}

impl ExpertRowBuffers {
    /// Creates empty buffers for exchanging rows with elements of type `dtype`.
    fn new(ops: &dyn Ops, dtype: Dtype) -> Self {
        ExpertRowBuffers { packed: ops.zeroed(dtype, 0), received: ops.zeroed(dtype, 0), pending: None }
    }

    /// Starts to send token rows to the ranks of their experts and to receive rows for this rank's
    /// experts or, if `back` is set, to return the results. The pair contains the numbers of
    /// elements that this rank sends to each rank and receives from each rank.
    fn start_exchange(
        &mut self,
        queue: &CollectiveQueue,
        back: bool,
        (sent, received): (Vec<usize>, Vec<usize>),
    ) {
        let (mut packed, mut arrived) =
            (std::mem::take(&mut self.packed), std::mem::take(&mut self.received));
        self.pending = Some(queue.submit(move |comm| {
            let (from, to) = if back { (&arrived, &mut packed) } else { (&packed, &mut arrived) };
            let (out, space) = (sent.iter().sum(), received.iter().sum());
            comm.all_to_all(to.view_mut().slice(0..space), &received, from.view().slice(0..out), &sent)?;
            Ok((packed, arrived))
        }));
    }

    /// Waits until the running exchange of rows between ranks, if any, is complete, and takes its
    /// buffers back.
    fn wait_for_exchange(&mut self) -> Result<()> {
        if let Some(ticket) = self.pending.take() {
            (self.packed, self.received) = ticket.wait()?;
        }
        Ok(())
    }
}

/// Makes a buffer for token rows at least `len` elements long, and returns its first `len` elements
/// with unspecified values.
pub(super) fn resize_row_buffer<'a>(ops: &dyn Ops, buf: &'a mut Buf, len: usize) -> ViewMut<'a> {
    resize_buffer(ops, "MoE activations", buf, len)
}

impl TokenDispatcher {
    /// Creates a dispatcher of token rows for the expert-parallel group `group`, whose ranks send
    /// at most `max_rows` rows of `width` elements each.
    pub(super) fn new(
        ops: Arc<dyn Ops>,
        engine: &ZeroEngine,
        group: Range<usize>,
        max_rows: usize,
        width: usize,
    ) -> Self {
        let (world, rank, queue) = (engine.world(), engine.rank(), engine.queue().clone());
        let buffers = |dtype| ExpertRowBuffers::new(ops.as_ref(), dtype);
        let (rows, weights) = (buffers(engine.param_dtypes().compute), buffers(Dtype::F32));
        TokenDispatcher { ops, queue, world, rank, group, max_rows, width, rows, weights }
    }

    /// Returns the send and receive buffers for one kind of exchanged rows (activations or router
    /// factors), and the number of elements per row.
    fn select_buffers(&mut self, payload: ExchangedRowKind) -> (&mut ExpertRowBuffers, usize) {
        match payload {
            ExchangedRowKind::Rows => (&mut self.rows, self.width),
            ExchangedRowKind::Weights => (&mut self.weights, 1),
        }
    }

    /// Returns whether this rank has every expert, so that no rows are exchanged.
    pub(super) fn has_every_expert(&self) -> bool {
        self.group.len() == 1
    }

    /// Converts a list with one count for each rank of this expert-parallel group to a list for all
    /// ranks of the job, with 0 for ranks outside the group.
    fn spread_counts_over_ranks(&self, counts: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut by_rank = vec![0; self.world];
        self.group.clone().zip(counts).for_each(|(rank, n)| by_rank[rank] = n);
        by_rank
    }

    /// Exchanges in the expert-parallel group how many token rows each rank sends to each expert,
    /// and returns the numbers of rows that this rank will receive.
    ///
    /// Collective: every rank must call it.
    pub(super) fn exchange_row_counts(&self, layer: &MoeLayerPlan, sending: &SendPlan) -> Result<RecvPlan> {
        let owned = layer.per_rank[self.rank - self.group.start];
        if self.has_every_expert() {
            return Ok(RecvPlan::new(owned, sending.expert_rows.clone()));
        }
        let send: Vec<u64> = sending.expert_rows.iter().map(|&n| n as u64).collect();
        let sent = self.spread_counts_over_ranks(layer.per_rank.iter().copied());
        let received = self.spread_counts_over_ranks(std::iter::repeat(owned));
        let counts = self.queue.run_and_wait(move |comm| comm.all_to_all_u64(&received, &send, &sent))?;
        // a count above the limit is rejected below
        let limit = self.max_rows as u64 + 1;
        let counts = counts.into_iter().map(|n| n.min(limit) as usize).collect();
        let receiving = RecvPlan::new(owned, counts);
        match self.group.clone().zip(0..).find(|(_, i)| receiving.count_rows_from(*i) > self.max_rows) {
            None => Ok(receiving),
            Some((rank, _)) => {
                let message = format!(
                    "rank {rank} reported more rows than its tokens can have (limit {})",
                    self.max_rows
                );
                Err(Error::new(codes::training::PEER_REPORT_INVALID, message))
            }
        }
    }

    /// Starts to send the rows of this rank's tokens to the ranks that have the experts which the
    /// router chose. Before it returns, calls `fill` to write the rows to the given view in the
    /// order of the send plan. The caller must then call
    /// [`TokenDispatcher::wait_for_dispatched_rows`].
    ///
    /// If this rank has every expert, resizes `to`, calls `fill` with `to`, and sends nothing.
    /// Otherwise `to` does not change.
    pub(super) fn start_dispatch(
        &mut self,
        layer: &MoeLayerPlan,
        plan: DispatchPlan,
        payload: ExchangedRowKind,
        to: &mut Buf,
        fill: impl FnOnce(ViewMut),
    ) {
        let (local, queue, (sending, receiving)) = (self.has_every_expert(), self.queue.clone(), plan);
        let ops = self.ops.clone();
        let (buffers, width) = self.select_buffers(payload);
        if local {
            return fill(resize_row_buffer(ops.as_ref(), to, sending.row_tokens.len() * width));
        }
        fill(resize_row_buffer(ops.as_ref(), &mut buffers.packed, sending.row_tokens.len() * width));
        resize_row_buffer(ops.as_ref(), &mut buffers.received, receiving.count_rows() * width);
        let counts = self.count_elements_by_rank(layer, plan, payload);
        self.select_buffers(payload).0.start_exchange(&queue, false, counts);
    }

    /// Waits until other ranks' token rows for this rank's experts have arrived, and writes them to
    /// the buffer `to`, sorted by expert. Must follow [`TokenDispatcher::start_dispatch`]. Does
    /// nothing if this rank has every expert.
    pub(super) fn wait_for_dispatched_rows(
        &mut self,
        (_, receiving): DispatchPlan,
        payload: ExchangedRowKind,
        to: &mut Buf,
    ) -> Result<()> {
        if self.has_every_expert() {
            return Ok(());
        }
        let ops = self.ops.clone();
        let (buffers, width) = self.select_buffers(payload);
        buffers.wait_for_exchange()?;
        let (mut to, from) =
            (resize_row_buffer(ops.as_ref(), to, receiving.count_rows() * width), buffers.received.view());
        for (rows, at) in receiving.list_row_blocks() {
            let block = from.slice(rows.start * width..rows.end * width);
            ops.copy(to.slice_mut(at * width..at * width + block.len()), block);
        }
        Ok(())
    }

    /// Starts to send the outputs of this rank's experts, which are in `from`, back to the ranks
    /// whose tokens were the inputs. The rows must be sorted by expert. The caller must then call
    /// [`TokenDispatcher::wait_for_combined_rows`]. Does nothing if this rank has every expert.
    pub(super) fn start_combine(
        &mut self,
        layer: &MoeLayerPlan,
        plan: DispatchPlan,
        payload: ExchangedRowKind,
        from: &Buf,
    ) {
        if self.has_every_expert() {
            return;
        }
        let (queue, (sending, receiving)) = (self.queue.clone(), plan);
        let (sent, received) = self.count_elements_by_rank(layer, plan, payload);
        let ops = self.ops.clone();
        let (buffers, width) = self.select_buffers(payload);
        let mut arrived =
            resize_row_buffer(ops.as_ref(), &mut buffers.received, receiving.count_rows() * width);
        for (rows, at) in receiving.list_row_blocks() {
            let block = arrived.slice_mut(rows.start * width..rows.end * width);
            let from = from.view().slice(at * width..at * width + block.len());
            ops.copy(block, from);
        }
        resize_row_buffer(ops.as_ref(), &mut buffers.packed, sending.row_tokens.len() * width);
        buffers.start_exchange(&queue, true, (received, sent));
    }

    /// Waits until the experts' outputs for this rank's tokens have arrived, and returns them in
    /// the order in which the token rows were sent. Further calls return the same results until the
    /// next dispatch of this payload.
    ///
    /// If this rank has every expert, returns the rows of `from`, which must be the argument that
    /// was given to `start_combine`. Otherwise `from` is not used.
    pub(super) fn wait_for_combined_rows<'a>(
        &'a mut self,
        (sending, _): DispatchPlan,
        payload: ExchangedRowKind,
        from: &'a Buf,
    ) -> Result<View<'a>> {
        let local = self.has_every_expert();
        let (buffers, width) = self.select_buffers(payload);
        buffers.wait_for_exchange()?;
        let combined = if local { from } else { &buffers.packed };
        Ok(combined.view().slice(0..sending.row_tokens.len() * width))
    }

    /// Computes, for one mixture-of-experts layer, the number of elements that this rank sends to
    /// each rank and the number that it receives from each rank.
    fn count_elements_by_rank(
        &self,
        layer: &MoeLayerPlan,
        (s, r): DispatchPlan,
        payload: ExchangedRowKind,
    ) -> (Vec<usize>, Vec<usize>) {
        let width = if matches!(payload, ExchangedRowKind::Rows) { self.width } else { 1 };
        let mut rest = &s.expert_rows[..];
        let sent = layer.per_rank.iter().map(|&n| {
            let (owned, after) = rest.split_at(n);
            rest = after;
            owned.iter().sum::<usize>() * width
        });
        let sent = self.spread_counts_over_ranks(sent);
        (sent, self.spread_counts_over_ranks((0..self.group.len()).map(|i| r.count_rows_from(i) * width)))
    }
}
