//! The commands, one file each; here what they share.
pub(crate) mod check;
pub(crate) mod ckpt;
pub(crate) mod events;
pub(crate) mod import;
pub(crate) mod logs;
pub(crate) mod plan;
mod prepare;
pub(crate) mod ps;
pub(crate) mod run;
pub(crate) mod sbatch;
pub(crate) mod stop;
mod targets;

use crate::{error::Failure, report::plain};

/// Tells a failure; its exit code.
pub(crate) fn fail(failure: &Failure) -> u8 {
    plain::say(&failure.text(plain::color()));
    failure.kind.exit_code()
}

/// Writes data to stdout; the exit code.
pub(crate) fn show(text: &str) -> u8 {
    match plain::data(text) {
        Ok(()) => contract::exit::DONE,
        Err(error) => {
            let failure = Failure::new(crate::error::Kind::Failed, "the output can't be written");
            fail(&failure.cause(&error))
        }
    }
}
