//! The messages by which agents keep workers running after the loss of their controller, and accept
//! a new controller of the run. They are the terms on which an agent obeys a controller, the token
//! that distinguishes the controllers of a run, and the messages with which a new controller takes
//! over the agents.
use super::{
    host_plan::HostPlan,
    inventory::HostInventory,
    peers::{JobSecretKey, WorkerPeers},
};
use diagnostic::Diagnostic;
use jobspec::ControllerLossAction;
use serde::{Deserialize, Serialize};

/// Two numbers by which the controllers of a run are ordered, so that an agent obeys a new
/// controller instead of an earlier one. An agent obeys the controller with the greatest token that
/// it has accepted, and no other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ControllerToken {
    /// The number of the controller in the order in which controllers took over the run, from 1.
    pub epoch: u64,
    /// A random number, which decides between controllers that chose the same epoch.
    pub id: u64,
}

/// The settings by which an agent recognizes its controller, such as its token, and by which the
/// agent reacts if the controller is lost. Agents of `launch check` have none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SupervisionTerms {
    /// The name of the run.
    pub run: String,
    /// The name of the agent's host, as the job states it.
    pub host: String,
    /// The key of the run, which a later controller has to know.
    pub key: JobSecretKey,
    /// The token of the controller.
    pub token: ControllerToken,
    /// The number of the agent among those that the controller has started.
    pub number: u64,
    /// The silence of this controller after which another controller may replace it, in
    /// milliseconds (`run.host_lease`).
    pub host_lease_ms: u64,
    /// The silence after which the controller counts as lost, in milliseconds
    /// (`run.controller_lease`).
    pub controller_lease_ms: u64,
    /// What the agent does when the controller is lost.
    pub on_controller_loss: ControllerLossAction,
    /// How long the workers continue without a controller, in milliseconds.
    pub controller_timeout_ms: u64,
}

/// The message in which a new controller of a run asks an agent that still runs on a host to obey
/// it or to end. The controller sends this message first on a connection to a new `launch agent`
/// process, which forwards the message to the running agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttachRequest {
    /// The version of the control protocol.
    pub version: u32,
    /// The name of the run.
    pub run: String,
    /// The name of the host, as the job states it.
    pub host: String,
    /// The key of the run.
    pub key: JobSecretKey,
    /// The token of the new controller.
    pub token: ControllerToken,
    /// The silence of another controller after which the agent may obey this one, in milliseconds
    /// (`run.host_lease`).
    pub host_lease_ms: u64,
    /// What the agent is to do.
    pub purpose: AttachPurpose,
}

/// What a new controller demands of an agent that still runs on a host: to work for this
/// controller, or to kill its workers and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttachPurpose {
    /// The agent is to obey the new controller.
    Adopt,
    /// The agent is to kill its workers and to end, because the controller no longer uses it.
    Evict {
        /// The agent ends if it obeys the same controller and its number is smaller than this one,
        /// or if it obeys an earlier controller.
        below: u64,
    },
}

/// The reason why a running agent rejects the request of a new controller to work for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AttachRejection {
    /// No agent of the run is alive on the host.
    NoAgent,
    /// The agent obeys another controller.
    Controlled {
        /// The token of that controller.
        token: ControllerToken,
        /// The time since the last message of that controller, in milliseconds.
        silent_ms: u64,
    },
    /// The agent has obeyed a controller whose token is greater than or equal to that of the
    /// request.
    Stale {
        /// The token of the controller that the agent obeyed most recently.
        token: ControllerToken,
    },
    /// The agent cannot be reached, or is of another version.
    Failed(Diagnostic),
}

/// What an agent that still runs on a host reports to a new controller of its run: its workers,
/// reports and hardware. The agent then repeats its reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdoptedAgent {
    /// The process id of the agent.
    pub pid: u32,
    /// The number that identifies the agent's sequence of reports.
    pub stream: u64,
    /// The number of the agent among those that its first controller has started.
    pub number: u64,
    /// The hardware and environment of the host.
    pub inventory: HostInventory,
    /// The sequence number of the agent's newest report; 0 if there is none. The agent repeats its
    /// reports up to this one to the new controller.
    pub last_report: u64,
    /// The newest memo of the previous controllers.
    pub memo: Option<String>,
    /// The time since the agent got this memo, in milliseconds; 0 without a memo.
    pub memo_age_ms: u64,
    /// The plan of the most recent attempt on the host; `None` before the first attempt.
    pub plan: Option<Box<HostPlan>>,
    /// The addresses of the workers, if the agent has received them in this attempt.
    pub peers: Option<WorkerPeers>,
    /// The time since the agent lost its controller, in milliseconds.
    pub unattended_ms: u64,
}
