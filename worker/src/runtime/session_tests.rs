//! Tests of stop requests before the first step. Tests of processes are in `tests/end_to_end/`.
use super::*;
use comm::{Comm, local};

/// Creates the session and the queue of each rank. The agents read nothing.
fn create_ranks(world: usize) -> Vec<(AgentSession, Arc<CollectiveQueue>, UnixStream)> {
    let create = |comm| {
        let (stream, agent) = UnixStream::pair().unwrap();
        let comm: Arc<dyn Comm> = Arc::new(comm);
        (
            AgentSession::new(stream),
            Arc::new(CollectiveQueue::new(comm, Arc::new(device::Cpu::new(1))).unwrap()),
            agent,
        )
    };
    local::create_group(world).into_iter().map(create).collect()
}

/// Lets every rank wait for its first step, and returns for each rank whether the step may begin.
/// `stopped` are the ranks with a stop request.
fn begin_on_ranks(stopped: &[usize]) -> Vec<bool> {
    let ranks = create_ranks(3);
    stopped.iter().for_each(|rank| ranks[*rank].0.requests.request_stop());
    std::thread::scope(|scope| {
        let begin = |rank: usize| {
            let (session, queue, _) = &ranks[rank];
            scope.spawn(move || session.begin_first_step(queue).unwrap())
        };
        let threads: Vec<_> = (0..ranks.len()).map(begin).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn no_rank_begins_the_first_step_if_one_of_them_has_to_stop() {
    assert_eq!(begin_on_ranks(&[]), [true; 3]);
    for stopped in [&[0][..], &[2], &[0, 1, 2]] {
        assert_eq!(begin_on_ranks(stopped), [false; 3], "{stopped:?}");
    }
}

#[test]
fn a_failed_collective_is_a_stop_if_the_request_follows_before_the_first_step() {
    let aborted = Error::aborted(Diagnostic::error(codes::collective::COLLECTIVE_ABORTED, "rank 1 is gone"));
    let failed = Error::new(codes::run::INTERNAL, "not a consequence");
    let (session, _, _agent) = create_ranks(1).remove(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            session.requests.request_stop();
        });
        assert!(session.is_stopped_before_first_step(&aborted));
    });
    assert!(!session.is_stopped_before_first_step(&failed));
    let (session, _, _agent) = create_ranks(1).remove(0);
    session.call_abort_handlers("rank 1 failed");
    assert!(!session.is_stopped_before_first_step(&aborted), "the agent aborts after a failure");
    let (session, queue, _agent) = create_ranks(1).remove(0);
    assert!(session.begin_first_step(&queue).unwrap());
    session.requests.request_stop();
    assert!(!session.is_stopped_before_first_step(&aborted), "a step may be complete on other ranks");
}
