//! [`ObservedComm`]: a communicator that reports to an observer which collectives a rank enters and
//! completes.
use crate::{AbortReason, CollectiveKind, Comm, LinkDelays, PartialSink, Result, SharedWindow};
use device::{Dtype, View, ViewMut};
use std::sync::Arc;

/// Observer of one rank's collectives, which is called when the rank enters a collective and when
/// the collective completes. The functions must be fast, because the rank waits for them.
pub trait CallObserver: Send + Sync {
    /// Called with the kind of a collective when the rank enters it.
    fn on_enter(&self, kind: CollectiveKind);
    /// Called when the collective that the rank entered most recently has completed.
    fn on_return(&self);
}

/// A communicator that passes each collective to another communicator, and reports the collective's
/// start and successful end to an observer.
pub struct ObservedComm {
    inner: Arc<dyn Comm>,
    observer: Arc<dyn CallObserver>,
}

impl ObservedComm {
    /// Wraps the communicator `inner`, whose collectives are reported to an observer from now on.
    pub fn new(inner: Arc<dyn Comm>, observer: Arc<dyn CallObserver>) -> Self {
        ObservedComm { inner, observer }
    }

    /// Runs the collective `call` on the inner communicator, and reports its start and its success
    /// to the observer.
    fn run_observed<T>(&self, kind: CollectiveKind, call: impl FnOnce(&dyn Comm) -> Result<T>) -> Result<T> {
        self.observer.on_enter(kind);
        let result = call(self.inner.as_ref())?;
        self.observer.on_return();
        Ok(result)
    }
}

impl Comm for ObservedComm {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn all_gather(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        self.run_observed(CollectiveKind::AllGather, |comm| comm.all_gather(recv, send, counts))
    }

    fn reduce_scatter_ordered(
        &self,
        partials: &[View],
        partial_counts: &[usize],
        counts: &[usize],
        sink: &mut PartialSink,
    ) -> Result<()> {
        let call = |comm: &dyn Comm| comm.reduce_scatter_ordered(partials, partial_counts, counts, sink);
        self.run_observed(CollectiveKind::ReduceScatterOrdered, call)
    }

    fn reduce_scatter(&self, recv: ViewMut, send: View, counts: &[usize]) -> Result<()> {
        self.run_observed(CollectiveKind::ReduceScatter, |comm| comm.reduce_scatter(recv, send, counts))
    }

    fn has_native_reduce_scatter(&self) -> bool {
        self.inner.has_native_reduce_scatter()
    }

    fn all_reduce(&self, x: ViewMut) -> Result<()> {
        self.run_observed(CollectiveKind::AllReduce, |comm| comm.all_reduce(x))
    }

    fn broadcast(&self, x: ViewMut, root: usize) -> Result<()> {
        self.run_observed(CollectiveKind::Broadcast, |comm| comm.broadcast(x, root))
    }

    fn all_to_all(
        &self,
        recv: ViewMut,
        recv_counts: &[usize],
        send: View,
        send_counts: &[usize],
    ) -> Result<()> {
        let call = |comm: &dyn Comm| comm.all_to_all(recv, recv_counts, send, send_counts);
        self.run_observed(CollectiveKind::AllToAll, call)
    }

    fn all_to_all_bytes(
        &self,
        recv: &mut [u8],
        recv_counts: &[usize],
        send: &[u8],
        send_counts: &[usize],
    ) -> Result<()> {
        let call = |comm: &dyn Comm| comm.all_to_all_bytes(recv, recv_counts, send, send_counts);
        self.run_observed(CollectiveKind::AllToAll, call)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.run_observed(CollectiveKind::AllGatherBytes, |comm| comm.all_gather_bytes(bytes))
    }

    fn shared_window(&self, dtype: Dtype, counts: &[usize]) -> Result<Option<SharedWindow>> {
        self.run_observed(CollectiveKind::SharedWindow, |comm| comm.shared_window(dtype, counts))
    }

    fn list_rank_hosts(&self) -> Vec<usize> {
        self.inner.list_rank_hosts()
    }

    fn take_link_delays(&self) -> Option<LinkDelays> {
        self.inner.take_link_delays()
    }

    fn barrier(&self) -> Result<()> {
        self.run_observed(CollectiveKind::Barrier, |comm| comm.barrier())
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn abort_reason(&self) -> Option<AbortReason> {
        self.inner.abort_reason()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CommError, thread_comm};
    use std::sync::Mutex;

    /// The calls of a rank: `Some` for each entered collective, `None` for each return.
    #[derive(Default)]
    struct RecordedCalls(Mutex<Vec<Option<CollectiveKind>>>);

    impl CallObserver for RecordedCalls {
        fn on_enter(&self, kind: CollectiveKind) {
            self.0.lock().unwrap().push(Some(kind));
        }

        fn on_return(&self) {
            self.0.lock().unwrap().push(None);
        }
    }

    #[test]
    fn entered_and_completed_collectives_are_reported() {
        let calls = Arc::new(RecordedCalls::default());
        let comm = ObservedComm::new(Arc::new(thread_comm::create_thread_group(1).remove(0)), calls.clone());
        comm.barrier().unwrap();
        assert_eq!(comm.all_gather_u64(&[5]).unwrap(), [[5]]);
        comm.abort("over");
        assert!(matches!(comm.barrier(), Err(CommError::Aborted(_))), "a failed call does not return");
        let expected = [
            Some(CollectiveKind::Barrier),
            None,
            Some(CollectiveKind::AllGatherBytes),
            None,
            Some(CollectiveKind::Barrier),
        ];
        assert_eq!(*calls.0.lock().unwrap(), expected);
    }
}
