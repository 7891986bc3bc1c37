//! [`RemoteShards`]: finds out which ranks' files (shards) of a checkpoint are on other hosts, if
//! the hosts do not share a checkpoint directory.
use super::manifest::Manifest;
use super::storage_host::StorageHost;
use crate::codec::disk;
use std::path::Path;

/// The ranks' files (shards) of a checkpoint that are stored on other hosts, in directories that
/// this host does not see.
pub(crate) struct RemoteShards<'m> {
    manifest: &'m Manifest,
    /// Id of this host, or `None` if the checkpoint is not host-local or this host has no id.
    local_id: Option<String>,
}

impl<'m> RemoteShards<'m> {
    /// Reads the id of this host, by which shards on other hosts are recognized, from the directory
    /// that contains the checkpoint `path`. Without an id, every shard for which the manifest
    /// records a host counts as remote.
    pub(crate) fn new(path: &Path, manifest: &'m Manifest) -> Self {
        let local_id = match manifest.hosts.is_empty() {
            true => None,
            false => StorageHost::read_id(&disk::parent_dir(path)).unwrap_or(None),
        };
        RemoteShards { manifest, local_id }
    }

    /// Returns the host that stores the rank file (shard) number `file`, if that is another host
    /// than this one. Returns `None` if this host stores it, or the manifest records no hosts.
    pub(crate) fn remote_host(&self, file: usize) -> Option<&'m StorageHost> {
        self.manifest.shard_host(file).filter(|host| Some(&host.id) != self.local_id.as_ref())
    }
}
