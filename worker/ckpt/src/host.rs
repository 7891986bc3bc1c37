//! Hosts that keep shards in directories of their own, by an id that each directory of checkpoints has.
use crate::disk::Folder;
use crate::error::Result;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// In the directory of checkpoints: the id of the host whose directory it is.
pub(crate) const HOST: &str = ".host";
/// Hex digits of an id.
pub(crate) const ID_LEN: usize = 32;
/// The longest name of a host that is kept, bytes.
pub(crate) const NAME_MAX: usize = 255;

/// A host that keeps shards in a directory of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// 32 hex digits, kept in its directory of checkpoints.
    pub id: String,
    /// For people.
    pub name: String,
}

impl Host {
    /// The id in a directory of checkpoints; `None` when there is none, or what is left of writing one.
    pub(crate) fn id_of(root: &Path) -> Result<Option<String>> {
        let folder = Folder::open(root)?;
        if !folder.has(HOST)? {
            return Ok(None);
        }
        let text = String::from_utf8(folder.read(HOST, 4096)?).unwrap_or_default();
        Ok(text.strip_suffix('\n').filter(|id| is_id(id)).map(str::to_owned))
    }

    /// `Err` says what is wrong with it.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        let sound =
            is_id(&self.id) && self.name.len() <= NAME_MAX && !self.name.chars().any(char::is_control);
        if sound { Ok(()) } else { Err("a host whose id or name is none".into()) }
    }
}

fn is_id(text: &str) -> bool {
    text.len() == ID_LEN && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (id {})", self.name, self.id.get(..8).unwrap_or(&self.id))
    }
}
