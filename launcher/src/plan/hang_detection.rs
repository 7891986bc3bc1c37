//! [`choose_hang_detection`]: decides from `run.hang_timeout` and from the devices of the workers
//! whether hangs are detected.
use jobspec::{HangTimeout, JobSpec};
use protocol::control::HangDetection;

/// The default time without progress, in milliseconds, after which a job with accelerators counts
/// as hanging. A rank that waits for its GPU cannot notice that the GPU or a peer hangs.
const DEFAULT_TIMEOUT_MS: u64 = 10 * 60 * 1000;

/// The reason why launch does or does not detect hangs of a job, such as a key of the job or the
/// kind of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HangDetectionReason {
    /// The job sets `run.hang_timeout`.
    Requested,
    /// The built-in training uses GPUs.
    TrainsOnGpus,
    /// The workers of a program have accelerators, or may have some.
    HasAccelerators,
    /// The workers have no accelerators.
    HasNoAccelerators,
    /// A rank has the terminal (`run.terminal`) and may wait for its user.
    HasTerminal,
    /// The program runs in containers (`run.container`), which hide its collectives.
    InContainer,
}

impl HangDetectionReason {
    /// Returns the reason why launch detects hangs of `job`, or why it does not, for the output of
    /// `launch plan`.
    pub(crate) fn explain(job: &JobSpec, detection: Option<HangDetection>) -> HangDetectionReason {
        let run = &job.run;
        match detection {
            _ if run.hang_timeout != HangTimeout::Auto => HangDetectionReason::Requested,
            Some(_) if run.command.is_none() => HangDetectionReason::TrainsOnGpus,
            Some(_) => HangDetectionReason::HasAccelerators,
            None if run.terminal.is_some() => HangDetectionReason::HasTerminal,
            None if run.container.is_some() => HangDetectionReason::InContainer,
            None => HangDetectionReason::HasNoAccelerators,
        }
    }

    /// Returns the identifier of the reason why hangs are detected or not, for the JSON output of
    /// `launch plan`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            HangDetectionReason::Requested => "requested",
            HangDetectionReason::TrainsOnGpus => "trains_on_gpus",
            HangDetectionReason::HasAccelerators => "accelerators",
            HangDetectionReason::HasNoAccelerators => "no_accelerators",
            HangDetectionReason::HasTerminal => "terminal",
            HangDetectionReason::InContainer => "container",
        }
    }

    /// Describes in words, for the text output of `launch plan`, which setting or default decides
    /// whether launch detects hangs of a job.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            HangDetectionReason::Requested => "run.hang_timeout",
            HangDetectionReason::TrainsOnGpus => "default of the built-in training on GPUs",
            HangDetectionReason::HasAccelerators => {
                "default of workers with accelerators, while a rank waits in a collective"
            }
            HangDetectionReason::HasNoAccelerators => "default of workers without accelerators",
            HangDetectionReason::HasTerminal => "default of jobs with run.terminal",
            HangDetectionReason::InContainer => "default of jobs with run.container",
        }
    }
}

/// Decides whether launch detects hangs of the job, and after how many milliseconds without
/// progress the job counts as hanging. `on_cpus` states that programs can only compute on CPUs, on
/// every host.
pub(super) fn choose_hang_detection(job: &JobSpec, on_cpus: bool) -> Option<HangDetection> {
    let detect = |timeout_ms, only_in_collectives| Some(HangDetection { timeout_ms, only_in_collectives });
    let run = &job.run;
    match run.hang_timeout {
        HangTimeout::Off => None,
        HangTimeout::After(timeout_ms) => detect(timeout_ms, false),
        HangTimeout::Auto if run.command.is_none() => {
            job.cluster.trains_on_gpus().then_some(DEFAULT_TIMEOUT_MS).and_then(|ms| detect(ms, false))
        }
        HangTimeout::Auto if on_cpus || run.terminal.is_some() || run.container.is_some() => None,
        HangTimeout::Auto => detect(DEFAULT_TIMEOUT_MS, true),
    }
}
