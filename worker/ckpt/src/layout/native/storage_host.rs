//! [`StorageHost`]: a host with a checkpoint directory that other hosts do not see, identified by
//! an id in that directory.
use crate::codec::disk::Directory;
use crate::error::{ManifestError, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// Name of the file in a host-local checkpoint directory that contains the id of the host on whose
/// disk the directory is.
pub(crate) const HOST_ID_FILE: &str = ".host";
/// Number of hexadecimal digits of the id that identifies a host.
pub(crate) const HOST_ID_LEN: usize = 32;
/// Maximum length in bytes of a host's name in the manifest of a checkpoint.
pub(crate) const HOST_NAME_BYTES_MAX: usize = 255;

/// A host that stores shards in a checkpoint directory that other hosts do not see.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageHost {
    /// The id of the host: 32 lower-case hex digits, which the checkpoint directory stores.
    pub id: String,
    /// Name of the host, for messages.
    pub name: String,
}

impl StorageHost {
    /// Reads the id of the host from the file [`HOST_ID_FILE`] in the checkpoint directory `root`.
    /// Returns `None` if there is no id or an invalid one.
    pub(crate) fn read_id(root: &Path) -> Result<Option<String>> {
        let directory = Directory::open(root)?;
        if !directory.has_entry(HOST_ID_FILE)? {
            return Ok(None);
        }
        let text = String::from_utf8(directory.read_file(HOST_ID_FILE, 4096)?).unwrap_or_default();
        Ok(text.strip_suffix('\n').filter(|id| is_host_id(id)).map(str::to_owned))
    }

    /// Fails if the id of the host is invalid, or its name is too long or has control characters.
    pub(crate) fn check(&self) -> std::result::Result<(), ManifestError> {
        let sound = is_host_id(&self.id)
            && self.name.len() <= HOST_NAME_BYTES_MAX
            && !self.name.chars().any(char::is_control);
        if sound { Ok(()) } else { Err(ManifestError::InvalidHost) }
    }
}

/// Returns true if `text` has the form of a host's id, which is 32 lower-case hex digits.
fn is_host_id(text: &str) -> bool {
    text.len() == HOST_ID_LEN && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl fmt::Display for StorageHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (id {})", self.name, self.id.get(..8).unwrap_or(&self.id))
    }
}
