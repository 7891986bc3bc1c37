//! Exchanges of data between the threads of a group ([`ThreadComm`]), which read each other's
//! buffers during a collective.
//!
//! In an exchange every rank publishes the addresses of its data, waits until all have published,
//! reads its peers' memory, and waits until all have finished reading. The second wait makes the
//! borrowed addresses sound: **no rank leaves an exchange while a peer still reads**, not even when
//! the group was aborted. After an abort no rank begins to read. A rank that is already reading
//! never waits for another rank, so the second wait ends.
use super::communicator::{ThreadCallState, ThreadComm};
use super::group::{Contribution, GroupState};
use crate::{
    AbortReason, CallMismatch, CommError, Result,
    call::{self, CollectiveCall, GroupPosition},
    collective_kind::CollectiveKind,
};
use diagnostic::quantity::format_seconds;
use std::{
    sync::{Arc, MutexGuard},
    time::Instant,
};

/// Guard that counts this rank as a reader of the other threads' buffers while it exists, so that
/// these threads keep their buffers valid. Dropping it, on return or during a panic, blocks until
/// no peer reads this rank's memory any more.
struct PeerReadGuard<'a> {
    comm: &'a ThreadComm,
    exchange: u64,
}

impl Drop for PeerReadGuard<'_> {
    fn drop(&mut self) {
        let group = &*self.comm.group;
        let rank = self.comm.position.rank;
        let mut state = group.lock_state();
        state.readers -= 1;
        state.finished[rank] = self.exchange;
        if std::thread::panicking() {
            state.aborted.get_or_insert(AbortReason::RankPanicked { rank });
        }
        let is_over = |s: &GroupState| {
            s.finished.iter().all(|&f| f >= self.exchange) || (s.aborted.is_some() && s.readers == 0)
        };
        if is_over(&state) {
            group.changed.notify_all();
        }
        let mut deadline = Instant::now() + group.timeout;
        while !is_over(&state) {
            if Instant::now() >= deadline {
                // A sink that never returns: abort the group, but keep the memory that it reads.
                let message = format!(
                    "a peer of rank {rank} reads its memory for longer than {}",
                    format_seconds(group.timeout)
                );
                state.aborted.get_or_insert(AbortReason::RankFailed { rank, message });
                deadline = Instant::now() + group.timeout;
                group.changed.notify_all();
            }
            state = group.wait_for_change(state, deadline);
        }
    }
}

impl ThreadComm {
    /// Publishes this rank's call and buffers (`contribution`), waits until all ranks have done so,
    /// and calls `read` with the contributions of all ranks. Fails if the ranks made different
    /// calls. Returns when no rank reads any more.
    pub(super) fn exchange_contributions(
        &self,
        call_state: &mut ThreadCallState,
        contribution: Contribution,
        read: impl FnOnce(&[Arc<Contribution>]),
    ) -> Result<()> {
        call_state.exchanges += 1;
        let exchange = call_state.exchanges;
        let contributions = self.publish_and_wait_for_peers(exchange, contribution)?;
        let guard = PeerReadGuard { comm: self, exchange };
        read(&contributions);
        drop(guard);
        let state = self.group.lock_state();
        match &state.aborted {
            Some(reason) if state.finished.iter().any(|&f| f < exchange) => {
                Err(CommError::Aborted(reason.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Publishes this rank's call and buffers (`contribution`), and returns the contributions of
    /// all ranks once every rank has published one. On success this rank counts as a reader.
    fn publish_and_wait_for_peers(
        &self,
        exchange: u64,
        contribution: Contribution,
    ) -> Result<Vec<Arc<Contribution>>> {
        let group = &*self.group;
        let call = contribution.call;
        let deadline = Instant::now() + group.timeout;
        let mut state = group.lock_state();
        state.contributions[self.position.rank] = Some(Arc::new(contribution));
        state.entered[self.position.rank] = exchange;
        let is_complete = |s: &GroupState| s.entered.iter().all(|&e| e >= exchange);
        if is_complete(&state) {
            group.changed.notify_all();
        }
        while !is_complete(&state) && state.aborted.is_none() {
            let ranks = 0..self.position.world;
            let missing: Vec<usize> = ranks.filter(|&r| state.entered[r] < exchange).collect();
            if let Some(&rank) = missing.iter().find(|&&r| state.has_left[r]) {
                let collective = call.to_string();
                state.aborted.get_or_insert(AbortReason::PeerLeft { rank, collective });
                group.changed.notify_all();
                break;
            }
            if Instant::now() >= deadline {
                let error = self.build_timeout_error(&call, missing);
                state.aborted.get_or_insert_with(|| error.to_abort_reason(self.position.rank));
                group.changed.notify_all();
                return Err(error); // not all ranks have entered, so no rank reads
            }
            state = group.wait_for_change(state, deadline);
        }
        // Compare before checking for an abort: every rank that met the others reports the
        // mismatch.
        if is_complete(&state) {
            let contributions: Vec<Arc<Contribution>> =
                state.contributions.iter().flatten().cloned().collect();
            if let Err(mismatch) = self.check_contributions(&call, &contributions) {
                let error = CommError::Mismatch(mismatch);
                state.aborted.get_or_insert_with(|| error.to_abort_reason(self.position.rank));
                group.changed.notify_all();
                return self.wait_for_readers(state, error);
            }
            if state.aborted.is_none() {
                state.readers += 1;
                return Ok(contributions);
            }
        }
        let reason = state.aborted.clone().unwrap_or(AbortReason::Lost);
        self.wait_for_readers(state, CommError::Aborted(reason))
    }

    /// Waits after an abort until no thread reads the buffers of other threads, and then fails with
    /// `error`.
    fn wait_for_readers<T>(&self, mut state: MutexGuard<'_, GroupState>, error: CommError) -> Result<T> {
        while state.readers > 0 {
            state = self.group.wait_for_change(state, Instant::now() + self.group.timeout);
        }
        Err(error)
    }

    /// Creates the timeout error of this rank's collective `call`, which the ranks in `missing` did
    /// not enter in time.
    fn build_timeout_error(&self, call: &CollectiveCall, missing: Vec<usize>) -> CommError {
        let GroupPosition { rank, world } = self.position;
        let (collective, call_number, timeout) = (call.kind, call.number, self.group.timeout);
        CommError::Timeout { rank, world, collective, call_number, timeout, missing }
    }

    /// Checks that all ranks called the same collective, and that in an all-to-all every rank sends
    /// this rank as many elements as this rank expects.
    fn check_contributions(
        &self,
        call: &CollectiveCall,
        contributions: &[Arc<Contribution>],
    ) -> std::result::Result<(), CallMismatch> {
        let rank = self.position.rank;
        for (peer, theirs) in contributions.iter().enumerate() {
            call.check_peer_call(rank, peer, theirs.call.to_words())?;
        }
        if call.kind == CollectiveKind::AllToAll {
            let ours = &contributions[rank];
            for (peer, theirs) in contributions.iter().enumerate() {
                let (sent, expected) = (theirs.slices[rank].len(), ours.expected[peer]);
                call::check_transfer_elements(peer, rank, sent as u64, expected as u64)?;
                let (sent, expected) = (ours.slices[peer].len(), theirs.expected[rank]);
                call::check_transfer_elements(rank, peer, sent as u64, expected as u64)?;
            }
        }
        Ok(())
    }
}
