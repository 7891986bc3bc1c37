//! The names of hosts that join, such as `node-0` and `node-1`.

/// Returns the name of the host that has joined with a node rank.
pub(super) fn format_node_name(rank: u32) -> String {
    format!("node-{rank}")
}

/// Returns the node rank in the name of a host.
pub(super) fn parse_node_name(name: &str) -> Option<u32> {
    name.strip_prefix("node-")?.parse().ok()
}
