//! [`OtherLauncher`]: the launchers whose command lines launch can run, such as torchrun, and
//! [`LauncherProgram`]: the programs of these launchers.
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
    /// Returns the name of the launcher's program, such as `torchrun`, which is also the name of
    /// the command of launch.
    pub(crate) fn name(self) -> &'static str {
        match self {
            OtherLauncher::Torchrun => "torchrun",
            OtherLauncher::Accelerate => "accelerate",
            OtherLauncher::Deepspeed => "deepspeed",
        }
    }
}

/// A program of another launcher.
#[derive(Debug)]
pub(crate) struct LauncherProgram {
    /// The file name of the program, such as `accelerate-launch`.
    pub(crate) name: &'static str,
    /// The launcher.
    pub(crate) launcher: OtherLauncher,
    /// The words of the launcher's command line that the program implies, such as `launch`.
    pub(crate) words: &'static [&'static str],
}

impl LauncherProgram {
    /// All programs whose command lines launch can run.
    pub(crate) const ALL: &[LauncherProgram] = &[
        LauncherProgram { name: "torchrun", launcher: OtherLauncher::Torchrun, words: &[] },
        LauncherProgram { name: "accelerate", launcher: OtherLauncher::Accelerate, words: &[] },
        LauncherProgram {
            name: "accelerate-launch",
            launcher: OtherLauncher::Accelerate,
            words: &["launch"],
        },
        LauncherProgram { name: "deepspeed", launcher: OtherLauncher::Deepspeed, words: &[] },
    ];

    /// Returns the program with the name `name`, such as `torchrun`, or `None` if launch replaces
    /// no such program.
    pub(crate) fn from_name(name: &OsStr) -> Option<&'static LauncherProgram> {
        LauncherProgram::ALL.iter().find(|program| name == program.name)
    }

    /// Returns the program that the path `program` names by its file name, such as torchrun for
    /// `/usr/bin/torchrun`.
    pub(crate) fn from_path(program: &OsStr) -> Option<&'static LauncherProgram> {
        LauncherProgram::from_name(Path::new(program).file_name()?)
    }
}
