//! The names that hosts get when they join a run, such as `node-0` and `node-1`.

/// Returns the name of the host that has joined with the node rank `rank`, such as `node-1`.
pub(super) fn format_node_name(rank: u32) -> String {
    format!("node-{rank}")
}

/// Parses the node rank in the name of a host that has joined, such as 1 in `node-1`.
pub(super) fn parse_node_name(name: &str) -> Option<u32> {
    name.strip_prefix("node-")?.parse().ok()
}
