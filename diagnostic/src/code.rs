//! [`Code`]: the stable name of one kind of error, such as `ssh-host-key-unknown`, with its
//! explanation and exit code.
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;

/// The kind of failure (usage, job, cluster, checkpoint or other) that a diagnostic reports. The
/// category decides the exit code of `launch` (docs/cli.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// The command line is wrong (exit code 2).
    Usage,
    /// The content of the job file is wrong (exit code 2).
    Job,
    /// A host, device, storage or port is not available (exit code 3).
    Cluster,
    /// The checkpoint is not usable (exit code 4).
    Checkpoint,
    /// The operation was started and then failed (exit code 1).
    Failed,
}

impl Category {
    /// Returns the exit code of `launch` for a failure of this kind.
    pub const fn exit_code(self) -> u8 {
        match self {
            Category::Usage | Category::Job => 2,
            Category::Cluster => 3,
            Category::Checkpoint => 4,
            Category::Failed => 1,
        }
    }
}

/// The explanation of one error code, such as `ssh-host-key-unknown`: its summary, usual causes and
/// remedy, which `launch explain CODE` shows.
#[derive(Debug)]
pub struct CodeInfo {
    /// The name of the code in kebab-case, such as `ssh-host-key-unknown`. A released name never
    /// changes.
    pub name: &'static str,
    /// The default category of diagnostics with this code. A diagnostic may replace it.
    pub category: Category,
    /// One sentence that states what happened.
    pub summary: &'static str,
    /// The usual causes of the error, in one or several sentences.
    pub cause: &'static str,
    /// What the user can do about the error, in one or several sentences.
    pub remedy: &'static str,
}

/// The stable name of one kind of error, such as `ssh-host-key-unknown`, by which users and
/// programs recognize it. Two codes are equal if their names are equal. A code is serialized as its
/// name; module `codes` finds the code of a name.
#[derive(Clone, Copy)]
pub struct Code(&'static CodeInfo);

impl Code {
    /// Creates a diagnostic code from `info`, which contains the name of the code, its exit
    /// category and its explanation. Only the tables in [`crate::codes`] call this function, so
    /// that every code has an explanation.
    pub(crate) const fn new(info: &'static CodeInfo) -> Self {
        Code(info)
    }

    /// Returns the name of the code in kebab-case, such as `ssh-host-key-unknown`.
    pub const fn name(self) -> &'static str {
        self.0.name
    }

    /// Returns the category (usage, job, cluster, checkpoint or other) that diagnostics with this
    /// code have by default.
    pub const fn category(self) -> Category {
        self.0.category
    }

    /// Returns the explanation of the code: summary, cause and remedy.
    pub const fn info(self) -> &'static CodeInfo {
        self.0
    }
}

impl PartialEq for Code {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for Code {}

impl PartialEq<str> for Code {
    fn eq(&self, other: &str) -> bool {
        self.0.name == other
    }
}

impl PartialEq<&str> for Code {
    fn eq(&self, other: &&str) -> bool {
        self.0.name == *other
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Code({})", self.0.name)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name)
    }
}
