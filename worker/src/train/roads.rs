//! The ways between a rank's tokens and their experts on other ranks: what travels there or back does so in the background
//! until it is waited for.
use super::experts::{Layer, grow};
use crate::{
    error::{Error, Result},
    experts::{Receiving, Sending},
    zero::{
        engine::Engine,
        queue::{Queue, Ticket},
    },
};
use device::{Buf, Dtype, Ops, View, ViewMut};
use std::{ops::Range, sync::Arc};

/// How the rows of a layer are sent, and how they are received.
type Ways<'a> = (&'a Sending, &'a Receiving);

/// What travels.
#[derive(Clone, Copy)]
pub(super) enum Cargo {
    /// As wide as the residual stream.
    Rows,
    /// A number for each row, `f32` in every precision.
    Weights,
}

/// The ways between a rank's tokens and their experts.
pub(super) struct Roads {
    ops: Arc<dyn Ops>,
    queue: Arc<Queue>,
    world: usize,
    rank: usize,
    /// The ranks of this one's group.
    pub(super) group: Range<usize>,
    /// The most rows that one rank may send.
    limit: usize,
    /// Elements of a row.
    width: usize,
    rows: Lane,
    weights: Lane,
}

/// Buffers between which one cargo travels; both are away meanwhile.
struct Lane {
    /// In the order of travel.
    packed: Buf,
    /// In the order of arrival.
    arrived: Buf,
    under_way: Option<Ticket<(Buf, Buf)>>,
}

impl Lane {
    fn of(ops: &dyn Ops, dtype: Dtype) -> Self {
        Lane { packed: ops.zeroed(dtype, 0), arrived: ops.zeroed(dtype, 0), under_way: None }
    }

    /// From `packed` to `arrived`, or back.
    fn trade(&mut self, queue: &Queue, back: bool, (sent, received): (Vec<usize>, Vec<usize>)) {
        let (mut packed, mut arrived) = (std::mem::take(&mut self.packed), std::mem::take(&mut self.arrived));
        self.under_way = Some(queue.submit(move |comm| {
            let (from, to) = if back { (&arrived, &mut packed) } else { (&packed, &mut arrived) };
            let (out, room) = (sent.iter().sum(), received.iter().sum());
            comm.all_to_all(to.view_mut().slice(0..room), &received, from.view().slice(0..out), &sent)?;
            Ok((packed, arrived))
        }));
    }

    /// Waits for what is under way.
    fn wait(&mut self) -> Result<()> {
        if let Some(ticket) = self.under_way.take() {
            (self.packed, self.arrived) = ticket.wait()?;
        }
        Ok(())
    }
}

impl Roads {
    pub(super) fn new(
        ops: Arc<dyn Ops>,
        engine: &Engine,
        group: Range<usize>,
        limit: usize,
        width: usize,
    ) -> Self {
        let (world, rank, queue) = (engine.world(), engine.rank(), engine.queue().clone());
        let of = |dtype| Lane::of(ops.as_ref(), dtype);
        let (rows, weights) = (of(engine.weights().dtype), of(Dtype::F32));
        Roads { ops, queue, world, rank, group, limit, width, rows, weights }
    }

    fn lane(&mut self, cargo: Cargo) -> (&mut Lane, usize) {
        match cargo {
            Cargo::Rows => (&mut self.rows, self.width),
            Cargo::Weights => (&mut self.weights, 1),
        }
    }

    /// Is every expert here?
    pub(super) fn local(&self) -> bool {
        self.group.len() == 1
    }

    /// `counts[i]` for rank i of the group, 0 for the others.
    fn in_world(&self, counts: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut all = vec![0; self.world];
        self.group.clone().zip(counts).for_each(|(rank, n)| all[rank] = n);
        all
    }

    /// Tells every rank of the group how many rows each of its experts gets from here, and learns the same.
    pub(super) fn announce(&self, layer: &Layer, sending: &Sending) -> Result<Receiving> {
        let own = layer.per_rank[self.rank - self.group.start];
        if self.local() {
            return Ok(Receiving::new(own, sending.counts.clone()));
        }
        // Counts travel as bits: no arithmetic touches them.
        let send: Vec<f32> = sending.counts.iter().map(|&n| f32::from_bits(n as u32)).collect();
        let sent = self.in_world(layer.per_rank.iter().copied());
        let received = self.in_world(std::iter::repeat(own));
        let counts = self.queue.run(move |comm| {
            let mut counts = vec![0f32; received.iter().sum()];
            comm.all_to_all((&mut counts[..]).into(), &received, (&send[..]).into(), &sent)?;
            Ok(counts)
        })?;
        let receiving = Receiving::new(own, counts.iter().map(|n| n.to_bits() as usize).collect());
        match self.group.clone().zip(0..).find(|(_, i)| receiving.from(*i) > self.limit) {
            None => Ok(receiving),
            Some((rank, _)) => {
                Err(Error::failed(format!("rank {rank} announced more rows than it can have")))
            }
        }
    }

    /// Sends what `fill` writes in the order of travel to the experts. [`Roads::arrive`] waits for it, and `to` is only
    /// written here where it doesn't travel.
    pub(super) fn leave(
        &mut self,
        layer: &Layer,
        ways: Ways,
        cargo: Cargo,
        to: &mut Buf,
        fill: impl FnOnce(ViewMut),
    ) {
        let (local, queue, (sending, receiving)) = (self.local(), self.queue.clone(), ways);
        let ops = self.ops.clone();
        let (lane, width) = self.lane(cargo);
        if local {
            return fill(grow(ops.as_ref(), to, sending.tokens.len() * width));
        }
        fill(grow(ops.as_ref(), &mut lane.packed, sending.tokens.len() * width));
        grow(ops.as_ref(), &mut lane.arrived, receiving.rows() * width);
        let counts = self.counts(layer, ways, cargo);
        self.lane(cargo).0.trade(&queue, false, counts);
    }

    /// What left arrives in `to`, sorted by expert.
    pub(super) fn arrive(&mut self, (_, receiving): Ways, cargo: Cargo, to: &mut Buf) -> Result<()> {
        if self.local() {
            return Ok(());
        }
        let ops = self.ops.clone();
        let (lane, width) = self.lane(cargo);
        lane.wait()?;
        let (mut to, from) = (grow(ops.as_ref(), to, receiving.rows() * width), lane.arrived.view());
        for (rows, at) in receiving.blocks() {
            let block = from.slice(rows.start * width..rows.end * width);
            ops.copy(to.part(at * width..at * width + block.len()), block);
        }
        Ok(())
    }

    /// Sends what lies in `from` sorted by expert back to the tokens. [`Roads::returned`] waits for it.
    pub(super) fn turn_back(&mut self, layer: &Layer, ways: Ways, cargo: Cargo, from: &Buf) {
        if self.local() {
            return;
        }
        let (queue, (sending, receiving)) = (self.queue.clone(), ways);
        let (sent, received) = self.counts(layer, ways, cargo);
        let ops = self.ops.clone();
        let (lane, width) = self.lane(cargo);
        let mut arrived = grow(ops.as_ref(), &mut lane.arrived, receiving.rows() * width);
        for (rows, at) in receiving.blocks() {
            let block = arrived.part(rows.start * width..rows.end * width);
            let from = from.view().slice(at * width..at * width + block.len());
            ops.copy(block, from);
        }
        grow(ops.as_ref(), &mut lane.packed, sending.tokens.len() * width);
        lane.trade(&queue, true, (received, sent));
    }

    /// What turned back, in the order of travel: it stays here until something leaves again. `from`: where it lies when it
    /// doesn't travel.
    pub(super) fn returned<'a>(
        &'a mut self,
        (sending, _): Ways,
        cargo: Cargo,
        from: &'a Buf,
    ) -> Result<View<'a>> {
        let local = self.local();
        let (lane, width) = self.lane(cargo);
        lane.wait()?;
        let all = if local { from } else { &lane.packed };
        Ok(all.view().slice(0..sending.tokens.len() * width))
    }

    /// Elements that go to and come from each rank.
    fn counts(&self, layer: &Layer, (s, r): Ways, cargo: Cargo) -> (Vec<usize>, Vec<usize>) {
        let width = if matches!(cargo, Cargo::Rows) { self.width } else { 1 };
        let mut rest = &s.counts[..];
        let sent = layer.per_rank.iter().map(|&n| {
            let (own, after) = rest.split_at(n);
            rest = after;
            own.iter().sum::<usize>() * width
        });
        let sent = self.in_world(sent);
        (sent, self.in_world((0..self.group.len()).map(|i| r.from(i) * width)))
    }
}
