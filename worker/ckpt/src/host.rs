//! [`Host`]: a host that stores shards in its own checkpoint directory, identified by the id in the
//! directory.
use crate::disk::Directory;
use crate::error::Result;
use crate::manifest_error::ManifestError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// The file with the id of the host, in the checkpoint directory.
pub(crate) const HOST: &str = ".host";
/// Number of hex digits of an id.
pub(crate) const ID_LEN: usize = 32;
/// Limit on the name of a host, bytes.
pub(crate) const NAME_MAX: usize = 255;

/// A host that stores shards in its own checkpoint directory.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageHost {
    /// 32 hex digits, stored in the checkpoint directory.
    pub id: String,
    /// Name for display.
    pub name: String,
}

impl StorageHost {
    /// Reads the id in a checkpoint directory; `None` when there is none, or an incomplete one.
    pub(crate) fn read_id(root: &Path) -> Result<Option<String>> {
        let directory = Directory::open(root)?;
        if !directory.has(HOST)? {
            return Ok(None);
        }
        let text = String::from_utf8(directory.read(HOST, 4096)?).unwrap_or_default();
        Ok(text.strip_suffix('\n').filter(|id| is_id(id)).map(str::to_owned))
    }

    /// Rejects an invalid id or name.
    pub(crate) fn check(&self) -> std::result::Result<(), ManifestError> {
        let sound =
            is_id(&self.id) && self.name.len() <= NAME_MAX && !self.name.chars().any(char::is_control);
        if sound { Ok(()) } else { Err(ManifestError::InvalidHost) }
    }
}

fn is_id(text: &str) -> bool {
    text.len() == ID_LEN && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl fmt::Display for StorageHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (id {})", self.name, self.id.get(..8).unwrap_or(&self.id))
    }
}
