//! [`ControllerIdentity`]: proves to agents that they may obey the controller.
use diagnostic::{Diagnostic, codes::run};
use jobspec::{ControllerLossAction, RunSpec};
use protocol::control::{
    AttachPurpose, AttachRequest, ControllerToken, JobKey, PROTOCOL_VERSION, SupervisionTerms,
};

/// The key of the run, the token of the controller, and the terms on which agents obey it.
#[derive(Clone, Debug)]
pub(super) struct ControllerIdentity {
    run: String,
    key: JobKey,
    token: ControllerToken,
    on_controller_loss: ControllerLossAction,
    host_lease_ms: u64,
    controller_lease_ms: u64,
    controller_timeout_ms: u64,
}

impl ControllerIdentity {
    /// Creates the identity of the first controller of a run, with a new key.
    pub(super) fn create(
        run: &str,
        settings: &RunSpec,
        on_controller_loss: ControllerLossAction,
    ) -> diagnostic::Result<ControllerIdentity> {
        let key = JobKey(draw_random_bytes()?);
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

    /// Creates the identity of a controller that takes over a run with this key. Agents obey the
    /// controller only if `epoch` is greater than that of earlier controllers.
    pub(super) fn create_for_takeover(
        run: &str,
        settings: &RunSpec,
        key: JobKey,
        epoch: u64,
    ) -> diagnostic::Result<ControllerIdentity> {
        let identity = ControllerIdentity::create(run, settings, ControllerLossAction::Continue)?;
        Ok(ControllerIdentity { key, token: draw_token(epoch)?, ..identity })
    }

    /// Returns the token of the controller.
    pub(super) fn token(&self) -> ControllerToken {
        self.token
    }

    /// Returns the key of the run.
    pub(super) fn key(&self) -> &JobKey {
        &self.key
    }

    /// Returns what agents do when this controller is lost.
    pub(super) fn loss_action(&self) -> ControllerLossAction {
        self.on_controller_loss
    }

    /// Builds the request that the agent on host `host` obey this controller or end, as `purpose`
    /// determines.
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

    /// Returns the terms on which the agent with the number `number` on host `host` obeys this
    /// controller.
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

/// Creates the token of a controller with the epoch `epoch` and a random id.
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
