//! [`KeptResources`]: what the process of a worker keeps between attempts (starts of all workers)
//! of a run, such as the open device.
use super::{
    rank_device::RankDevice,
    samples::SampleSets,
    session::{AgentSession, take_inherited_descriptor},
};
use crate::{data::TextTokenizer, error::Result};
use diagnostic::{Diagnostic, codes};
use jobspec::{TrainSpec, env};
use protocol::control::WorkerInit;
use std::os::fd::OwnedFd;

/// What the process of a worker keeps for later attempts (starts of all workers) of the run: the
/// device, the tokenizer, the samples and shared memory. All are `None` before the first attempt.
#[derive(Default)]
pub(super) struct KeptResources {
    /// The device with its thread pool.
    pub(super) device: Option<RankDevice>,
    pub(super) tokenizer: Option<TextTokenizer>,
    pub(super) samples: Option<SampleSets>,
    /// The memory of the host for copies of the states.
    pub(super) memory: Option<OwnedFd>,
    /// Whether the memory of the first attempt was taken over.
    has_taken_memory: bool,
}

impl KeptResources {
    /// Returns the file descriptor of the memory that this host's ranks share: the inherited one in
    /// the first attempt (start of all workers), later one from the agent. Returns `None` if this
    /// process inherited none.
    pub(super) fn take_shared_memory(&mut self, session: &AgentSession) -> Result<Option<OwnedFd>> {
        match std::mem::replace(&mut self.has_taken_memory, true) {
            false => take_inherited_descriptor(env::LAUNCH_SHM_FD),
            true => session.receive_shared_memory().map(Some),
        }
    }

    /// Opens the device and the tokenizer and limits the number of threads, unless this process has
    /// done so in an earlier attempt (start of all workers). Starts to use CUDA graphs as the job
    /// requests. Sends warnings about the device to the controller.
    pub(super) fn open_device_and_tokenizer(
        &mut self,
        session: &AgentSession,
        init: &WorkerInit,
        train: &TrainSpec,
    ) -> Result<()> {
        if self.device.is_none() {
            limit_cpu_threads(init.threads as usize)?;
            let device = RankDevice::open(init)?;
            device.report_rejected_instructions(session, init)?;
            self.device = Some(device);
        }
        if let Some(device) = &self.device {
            device.configure_cuda_graphs(train.cuda_graphs);
        }
        if self.tokenizer.is_none() {
            let tokenizer = TextTokenizer::open(&train.data.tokenizer, &init.workdir);
            self.tokenizer = Some(tokenizer.map_err(Diagnostic::from)?);
        }
        Ok(())
    }

    /// Ends the use of the device by the attempt that this rank leaves, so that the process can
    /// take part in the next attempt (start of all workers). Fails if the GPU has failed, after
    /// which the process must end.
    pub(super) fn prepare_device_for_next_attempt(&self) -> Result<()> {
        match &self.device {
            Some(RankDevice::Gpu(cuda, _)) => Ok(cuda.reset()?),
            _ => Ok(()),
        }
    }
}

/// Sets the number of CPU threads that this process uses outside of the training steps, for example
/// for tokenizing and for initial values.
fn limit_cpu_threads(threads: usize) -> Result<()> {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|e| {
        Diagnostic::error(codes::training::WORKER_THREAD_FAILED, "cannot start the thread pool")
            .with_field("threads", threads)
            .with_cause(&e)
            .into()
    })
}
