//! [`OtherLauncher`]: the launchers whose command lines launch can run, such as torchrun.
use std::{ffi::OsStr, path::Path};

/// A launcher whose command lines launch can run: torchrun, accelerate or deepspeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OtherLauncher {
    /// torch's torchrun.
    Torchrun,
    /// Hugging Face Accelerate.
    Accelerate,
    /// The launcher of DeepSpeed.
    Deepspeed,
}

impl OtherLauncher {
    /// All launchers whose command lines launch can run.
    pub(crate) const ALL: [OtherLauncher; 3] =
        [OtherLauncher::Torchrun, OtherLauncher::Accelerate, OtherLauncher::Deepspeed];

    /// Returns the name of the launcher's program, such as `torchrun`, which is also the name of
    /// the command of launch.
    pub(crate) fn name(self) -> &'static str {
        match self {
            OtherLauncher::Torchrun => "torchrun",
            OtherLauncher::Accelerate => "accelerate",
            OtherLauncher::Deepspeed => "deepspeed",
        }
    }

    /// Returns the launcher with the name `name`, such as `torchrun`, or `None` if launch replaces
    /// no such launcher.
    pub(crate) fn from_name(name: &OsStr) -> Option<OtherLauncher> {
        OtherLauncher::ALL.into_iter().find(|launcher| name == launcher.name())
    }

    /// Returns the launcher that the path `program` names by its file name, such as torchrun for
    /// `/usr/bin/torchrun`.
    pub(crate) fn from_program_name(program: &OsStr) -> Option<OtherLauncher> {
        OtherLauncher::from_name(Path::new(program).file_name()?)
    }
}
