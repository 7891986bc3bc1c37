//! Tests of stop requests before the first step. Tests of processes are in `tests/end_to_end/`.
use super::*;
use comm::{Comm, thread_comm};

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
    thread_comm::create_thread_group(world).into_iter().map(create).collect()
}

/// Lets every rank wait for its first step, and returns for each rank whether the step may begin.
/// `stopped` are the ranks with a stop request.
fn begin_on_ranks(stopped: &[usize]) -> Vec<bool> {
    let ranks = create_ranks(3);
    stopped.iter().for_each(|rank| ranks[*rank].0.requests.request_stop());
    std::thread::scope(|scope| {
        let begin = |rank: usize| {
            let (session, queue, _) = &ranks[rank];
            scope.spawn(move || session.wait_for_first_step(queue).unwrap())
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
    let aborted =
        Error::new_aborted(Diagnostic::error(codes::collective::COLLECTIVE_ABORTED, "rank 1 is gone"));
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
    session.call_abort_handlers("rank 1 failed", false);
    assert!(!session.is_stopped_before_first_step(&aborted), "the agent aborts after a failure");
    let (session, queue, _agent) = create_ranks(1).remove(0);
    assert!(session.wait_for_first_step(&queue).unwrap());
    session.requests.request_stop();
    assert!(!session.is_stopped_before_first_step(&aborted), "a step may be complete on other ranks");
}

/// Builds the instructions of an attempt of a job with copies in memory.
fn build_init(attempt: u32) -> WorkerInit {
    let text = "train: {data: {files: [a]}}\ncheckpoint: {memory: {}}".to_owned();
    let job = jobspec::load_job(jobspec::JobSource::Text { name: "test".into(), text }, &[]);
    WorkerInit {
        version: PROTOCOL_VERSION,
        rank: 0,
        local_rank: 0,
        world: 1,
        local_world: 1,
        threads: 1,
        attempt,
        run: "run".into(),
        run_dir: "/tmp/run".into(),
        workdir: "/tmp".into(),
        job: job.unwrap_or_else(|e| panic!("{e:?}")).0,
        batch_job: None,
        continues_batch_job: false,
    }
}

/// Creates a session that can take part in several attempts, with the agent's ends of its control
/// connection and of the socket that passes shared memory.
fn create_lasting_session() -> (AgentSession, UnixStream, UnixStream) {
    let (stream, agent) = UnixStream::pair().unwrap();
    let (attempts, memory) = UnixStream::pair().unwrap();
    (AgentSession { attempts: Some(attempts), ..AgentSession::new(stream) }, agent, memory)
}

#[test]
fn a_rank_leaves_only_a_failed_attempt_and_only_if_the_agent_allows_it() {
    let aborted =
        Error::new_aborted(Diagnostic::error(codes::collective::COLLECTIVE_ABORTED, "rank 1 is gone"));
    let failed = Error::new(codes::run::INTERNAL, "not a consequence");
    let abort = |keep| ToWorker::Abort { reason: "rank 1 failed".into(), keep };
    let (session, _agent, _memory) = create_lasting_session();
    session.dispatch_message(abort(true));
    assert!(session.wait_for_leave_decision(&aborted, &build_init(0)));
    assert!(!session.wait_for_leave_decision(&failed, &build_init(0)));
    let mut init = build_init(0);
    init.job.checkpoint.memory = None;
    assert!(!session.wait_for_leave_decision(&aborted, &init));
    let (session, _agent, _memory) = create_lasting_session();
    session.dispatch_message(abort(false));
    assert!(!session.wait_for_leave_decision(&aborted, &build_init(0)));
    let (stream, _agent) = UnixStream::pair().unwrap();
    let session = AgentSession::new(stream);
    session.dispatch_message(abort(true));
    assert!(
        !session.wait_for_leave_decision(&aborted, &build_init(0)),
        "the process has no socket for later attempts"
    );
}

#[test]
fn a_rank_that_left_gets_the_memory_and_the_requests_of_the_next_attempt() {
    use nix::sys::socket::{ControlMessage, sendmsg};
    let (session, _agent, memory) = create_lasting_session();
    session.dispatch_message(ToWorker::Init(Box::new(build_init(1))));
    assert!(session.lock_inbox().init.is_none(), "the rank has not left its attempt");
    session.requests.request_stop();
    session.dispatch_message(ToWorker::Abort { reason: "rank 1 failed".into(), keep: true });
    let next = std::thread::scope(|scope| {
        let next = scope.spawn(|| session.wait_for_next_attempt(0).unwrap());
        while !session.lock_inbox().has_left {
            std::thread::sleep(Duration::from_millis(1));
        }
        let fds = [memory.as_raw_fd()];
        let flags = MsgFlags::empty();
        sendmsg::<()>(
            memory.as_raw_fd(),
            &[std::io::IoSlice::new(&[0])],
            &[ControlMessage::ScmRights(&fds)],
            flags,
            None,
        )
        .unwrap();
        session.dispatch_message(ToWorker::Init(Box::new(build_init(1))));
        session.dispatch_message(ToWorker::Save);
        next.join().unwrap()
    });
    assert_eq!(next.attempt, 1);
    assert!(session.find_abort_reason().is_none() && !session.requests.is_stop_requested());
    assert!(session.requests.take_save_request(), "the request belongs to the new attempt");
    session.receive_shared_memory().unwrap();
    drop(memory);
    let error = session.receive_shared_memory().unwrap_err();
    assert_eq!(error.diagnostic().code(), codes::training::SHARED_MEMORY_MISSING);
}
