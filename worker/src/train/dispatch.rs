//! Expert parallelism: dispatches rows of tokens to the ranks of their experts and combines the
//! results. Exchanges run in the background until they are waited for.
use super::moe::{MoeLayerPlan, resize_row_buffer};
use crate::{
    error::{Error, Result},
    expert_layout::{RecvPlan, SendPlan},
    zero::{
        collective_queue::{CollectiveQueue, PendingCollective},
        engine::Engine,
    },
};
use device::{Buf, Dtype, Ops, View, ViewMut};
use diagnostic::codes;
use std::{ops::Range, sync::Arc};

/// Which rows of a layer this rank sends, and which it receives.
type DispatchPlan<'a> = (&'a SendPlan, &'a RecvPlan);

/// The kind of values that an exchange transports.
#[derive(Clone, Copy)]
pub(super) enum Payload {
    /// Rows of the width of the residual stream.
    Rows,
    /// One `f32` number for each row.
    Weights,
}

/// Exchanges rows between the tokens of this rank and the ranks of their experts.
pub(super) struct TokenDispatcher {
    ops: Arc<dyn Ops>,
    queue: Arc<CollectiveQueue>,
    world: usize,
    rank: usize,
    /// The ranks of this rank's group.
    pub(super) group: Range<usize>,
    /// The largest number of rows that one rank may send.
    max_rows: usize,
    /// The number of elements of a row.
    width: usize,
    rows: PayloadBuffers,
    weights: PayloadBuffers,
}

/// The buffers of one payload. A running exchange owns them.
struct PayloadBuffers {
    /// Rows sorted by the rank of their expert, on the side of the tokens.
    packed: Buf,
    /// Rows in the order in which ranks sent them, on the side of the experts.
    received: Buf,
    pending: Option<PendingCollective<(Buf, Buf)>>,
}

impl PayloadBuffers {
    /// Empty buffers for elements of `dtype`.
    fn new(ops: &dyn Ops, dtype: Dtype) -> Self {
        PayloadBuffers { packed: ops.zeroed(dtype, 0), received: ops.zeroed(dtype, 0), pending: None }
    }

    /// Starts the exchange from `packed` to `received`; with `back`, from `received` to `packed`.
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

    /// Waits for the running exchange, if there is one.
    fn wait(&mut self) -> Result<()> {
        if let Some(ticket) = self.pending.take() {
            (self.packed, self.received) = ticket.wait()?;
        }
        Ok(())
    }
}

impl TokenDispatcher {
    /// A dispatcher for the ranks `group`, each of which sends at most `max_rows` rows of `width`
    /// elements.
    pub(super) fn new(
        ops: Arc<dyn Ops>,
        engine: &Engine,
        group: Range<usize>,
        max_rows: usize,
        width: usize,
    ) -> Self {
        let (world, rank, queue) = (engine.world(), engine.rank(), engine.queue().clone());
        let buffers = |dtype| PayloadBuffers::new(ops.as_ref(), dtype);
        let (rows, weights) = (buffers(engine.param_dtypes().compute), buffers(Dtype::F32));
        TokenDispatcher { ops, queue, world, rank, group, max_rows, width, rows, weights }
    }

    /// The buffers of a payload, and the number of elements of one of its rows.
    fn buffers(&mut self, payload: Payload) -> (&mut PayloadBuffers, usize) {
        match payload {
            Payload::Rows => (&mut self.rows, self.width),
            Payload::Weights => (&mut self.weights, 1),
        }
    }

    /// Whether this rank has every expert, so that no rows are exchanged.
    pub(super) fn is_local(&self) -> bool {
        self.group.len() == 1
    }

    /// `counts[i]` for rank i of the group, and 0 for all other ranks.
    fn counts_by_rank(&self, counts: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut by_rank = vec![0; self.world];
        self.group.clone().zip(counts).for_each(|(rank, n)| by_rank[rank] = n);
        by_rank
    }

    /// Exchanges the number of rows for each expert among the ranks of the group.
    pub(super) fn exchange_counts(&self, layer: &MoeLayerPlan, sending: &SendPlan) -> Result<RecvPlan> {
        let owned = layer.per_rank[self.rank - self.group.start];
        if self.is_local() {
            return Ok(RecvPlan::new(owned, sending.expert_rows.clone()));
        }
        // the collective transports f32 values; counts are sent as their bits
        let send: Vec<f32> = sending.expert_rows.iter().map(|&n| f32::from_bits(n as u32)).collect();
        let sent = self.counts_by_rank(layer.per_rank.iter().copied());
        let received = self.counts_by_rank(std::iter::repeat(owned));
        let counts = self.queue.run(move |comm| {
            let mut counts = vec![0f32; received.iter().sum()];
            comm.all_to_all((&mut counts[..]).into(), &received, (&send[..]).into(), &sent)?;
            Ok(counts)
        })?;
        let receiving = RecvPlan::new(owned, counts.iter().map(|n| n.to_bits() as usize).collect());
        match self.group.clone().zip(0..).find(|(_, i)| receiving.rows_from(*i) > self.max_rows) {
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

    /// Calls `fill` to write the rows, sorted by the rank of their expert, and starts to send them
    /// to these ranks. [`TokenDispatcher::wait_dispatched`] waits for the rows that this rank
    /// receives. If this rank has every expert, `fill` writes directly to `to` and nothing is sent.
    pub(super) fn dispatch(
        &mut self,
        layer: &MoeLayerPlan,
        plan: DispatchPlan,
        payload: Payload,
        to: &mut Buf,
        fill: impl FnOnce(ViewMut),
    ) {
        let (local, queue, (sending, receiving)) = (self.is_local(), self.queue.clone(), plan);
        let ops = self.ops.clone();
        let (buffers, width) = self.buffers(payload);
        if local {
            return fill(resize_row_buffer(ops.as_ref(), to, sending.row_tokens.len() * width));
        }
        fill(resize_row_buffer(ops.as_ref(), &mut buffers.packed, sending.row_tokens.len() * width));
        resize_row_buffer(ops.as_ref(), &mut buffers.received, receiving.rows() * width);
        let counts = self.element_counts(layer, plan, payload);
        self.buffers(payload).0.start_exchange(&queue, false, counts);
    }

    /// Waits for the dispatched rows and writes them to `to`, sorted by expert. Does nothing if
    /// this rank has every expert.
    pub(super) fn wait_dispatched(
        &mut self,
        (_, receiving): DispatchPlan,
        payload: Payload,
        to: &mut Buf,
    ) -> Result<()> {
        if self.is_local() {
            return Ok(());
        }
        let ops = self.ops.clone();
        let (buffers, width) = self.buffers(payload);
        buffers.wait()?;
        let (mut to, from) =
            (resize_row_buffer(ops.as_ref(), to, receiving.rows() * width), buffers.received.view());
        for (rows, at) in receiving.blocks() {
            let block = from.slice(rows.start * width..rows.end * width);
            ops.copy(to.slice_mut(at * width..at * width + block.len()), block);
        }
        Ok(())
    }

    /// Starts to send rows, sorted by expert in `from`, back to the ranks of their tokens.
    /// [`TokenDispatcher::wait_combined`] waits for them.
    pub(super) fn combine(&mut self, layer: &MoeLayerPlan, plan: DispatchPlan, payload: Payload, from: &Buf) {
        if self.is_local() {
            return;
        }
        let (queue, (sending, receiving)) = (self.queue.clone(), plan);
        let (sent, received) = self.element_counts(layer, plan, payload);
        let ops = self.ops.clone();
        let (buffers, width) = self.buffers(payload);
        let mut arrived = resize_row_buffer(ops.as_ref(), &mut buffers.received, receiving.rows() * width);
        for (rows, at) in receiving.blocks() {
            let block = arrived.slice_mut(rows.start * width..rows.end * width);
            let from = from.view().slice(at * width..at * width + block.len());
            ops.copy(block, from);
        }
        resize_row_buffer(ops.as_ref(), &mut buffers.packed, sending.row_tokens.len() * width);
        buffers.start_exchange(&queue, true, (received, sent));
    }

    /// Waits for the combined rows and returns them, sorted by the rank of their expert. They are
    /// valid until the next dispatch. If this rank has every expert, they are the rows of `from`.
    pub(super) fn wait_combined<'a>(
        &'a mut self,
        (sending, _): DispatchPlan,
        payload: Payload,
        from: &'a Buf,
    ) -> Result<View<'a>> {
        let local = self.is_local();
        let (buffers, width) = self.buffers(payload);
        buffers.wait()?;
        let combined = if local { from } else { &buffers.packed };
        Ok(combined.view().slice(0..sending.row_tokens.len() * width))
    }

    /// The elements that are sent to and received from each rank.
    fn element_counts(
        &self,
        layer: &MoeLayerPlan,
        (s, r): DispatchPlan,
        payload: Payload,
    ) -> (Vec<usize>, Vec<usize>) {
        let width = if matches!(payload, Payload::Rows) { self.width } else { 1 };
        let mut rest = &s.expert_rows[..];
        let sent = layer.per_rank.iter().map(|&n| {
            let (owned, after) = rest.split_at(n);
            rest = after;
            owned.iter().sum::<usize>() * width
        });
        let sent = self.counts_by_rank(sent);
        (sent, self.counts_by_rank((0..self.group.len()).map(|i| r.rows_from(i) * width)))
    }
}
