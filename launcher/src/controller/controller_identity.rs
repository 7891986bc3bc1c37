//! [`ControllerIdentity`]: the key and the token by which agents recognize the controller that may
//! give them orders.
use diagnostic::{Diagnostic, codes::run};
use jobspec::{ControllerLossAction, RunSpec};
use protocol::control::{
    AttachPurpose, AttachRequest, ControllerToken, JobSecretKey, PROTOCOL_VERSION, SupervisionTerms,
};

/// What identifies a controller to agents: the key of the run, the token by which agents recognize
/// the newest controller, and the time limits that both sides observe.
#[derive(Clone, Debug)]
pub(super) struct ControllerIdentity {
    run: String,
    key: JobSecretKey,
    token: ControllerToken,
    on_controller_loss: ControllerLossAction,
    host_lease_ms: u64,
    controller_lease_ms: u64,
    controller_timeout_ms: u64,
}

impl ControllerIdentity {
    /// Creates the identity (key, token and time limits) of the first controller of a run, with a
    /// new random key.
    pub(super) fn create(
        run: &str,
        settings: &RunSpec,
        on_controller_loss: ControllerLossAction,
    ) -> diagnostic::Result<ControllerIdentity> {
        let key = JobSecretKey(draw_random_bytes()?);
        Ok(ControllerIdentity {
            run: run.to_owned(),
            key,
            token: draw_token(1)?,
            on_controller_loss,
            host_lease_ms: settings.host_lease_ms,
            controller_lease_ms: settings.controller_lease_ms,
            controller_timeout_ms: settings.controller_timeout_ms,
        })
    }

    /// Creates the identity (key, token and time limits) of a controller that takes over a run with
    /// the existing key `key`. Agents obey the controller only if `epoch` is greater than that of
    /// earlier controllers.
    pub(super) fn create_for_takeover(
        run: &str,
        settings: &RunSpec,
        key: JobSecretKey,
        epoch: u64,
    ) -> diagnostic::Result<ControllerIdentity> {
        let identity = ControllerIdentity::create(run, settings, ControllerLossAction::Continue)?;
        Ok(ControllerIdentity { key, token: draw_token(epoch)?, ..identity })
    }

    /// Returns the token of the controller, by which agents decide which of several controllers
    /// they obey.
    pub(super) fn token(&self) -> ControllerToken {
        self.token
    }

    /// Returns the key with which the controller and the agents of the run authenticate each other.
    pub(super) fn key(&self) -> &JobSecretKey {
        &self.key
    }

    /// Returns the job's setting of what agents do when this controller is lost: end the workers,
    /// or let the workers continue.
    pub(super) fn controller_loss_action(&self) -> ControllerLossAction {
        self.on_controller_loss
    }

    /// Builds the request that the agent on `host` accept this controller as its new controller, or
    /// that the agent end, depending on `purpose`.
    pub(super) fn build_attach_request(&self, host: &str, purpose: AttachPurpose) -> AttachRequest {
        AttachRequest {
            version: PROTOCOL_VERSION,
            run: self.run.clone(),
            host: host.to_owned(),
            key: self.key.clone(),
            token: self.token,
            host_lease_ms: self.host_lease_ms,
            purpose,
        }
    }

    /// Builds the data that a new agent needs to recognize this controller later: the run, the key,
    /// the controller's token, and time limits.
    pub(super) fn build_supervision_terms(&self, host: &str, number: u64) -> SupervisionTerms {
        SupervisionTerms {
            run: self.run.clone(),
            host: host.to_owned(),
            key: self.key.clone(),
            token: self.token,
            number,
            host_lease_ms: self.host_lease_ms,
            controller_lease_ms: self.controller_lease_ms,
            on_controller_loss: self.on_controller_loss,
            controller_timeout_ms: self.controller_timeout_ms,
        }
    }
}

/// Creates a controller token (a number and a random ID), by which agents recognize the newest
/// controller of their run. `epoch` is the number of the controller within its run.
fn draw_token(epoch: u64) -> diagnostic::Result<ControllerToken> {
    Ok(ControllerToken { epoch, id: u64::from_le_bytes(draw_random_bytes()?) })
}

/// Returns `N` bytes from the kernel's random number generator.
pub(super) fn draw_random_bytes<const N: usize>() -> diagnostic::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        let message = "the system provides no random key for the job";
        Diagnostic::error(run::RANDOM_UNAVAILABLE, message).with_cause(&error)
    })?;
    Ok(bytes)
}
