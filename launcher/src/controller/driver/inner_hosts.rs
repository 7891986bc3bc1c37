//! Tracks which hosts' messages are forwarded by the agent of another host, and by which one (see
//! [`crate::cluster::RemoteAgentConnection::tree_route`]).
use super::ControllerDriver;
use crate::{
    cluster::AgentHandle,
    controller::core::{ControllerInput, HostIndex},
};
use std::collections::HashMap;

impl ControllerDriver {
    /// Informs the controller's state machine for which hosts the agent of another host now
    /// forwards the messages, and of which host. Does nothing without a tree.
    pub(super) fn update_inner_hosts(&mut self) {
        let routes = self.agents.iter().filter_map(|(host, agent)| match &agent.handle {
            AgentHandle::Connection(connection) => Some((*host, connection.tree_route()?)),
            AgentHandle::Child(_) => None,
        });
        let routes: HashMap<HostIndex, _> = routes.collect();
        if routes.is_empty() && self.inner_hosts.is_empty() {
            return;
        }
        let hosts: HashMap<u64, HostIndex> =
            routes.iter().map(|(host, route)| (route.agent, *host)).collect();
        let passed_on = routes.iter().filter(|(_, route)| route.first != route.agent);
        let inner_hosts: HashMap<HostIndex, HostIndex> =
            passed_on.filter_map(|(host, route)| Some((*host, *hosts.get(&route.first)?))).collect();
        let ended =
            self.inner_hosts.keys().filter(|host| !inner_hosts.contains_key(*host)).map(|host| (*host, None));
        let changed = inner_hosts.iter().filter(|(host, inner)| self.inner_hosts.get(*host) != Some(*inner));
        let changes: Vec<_> = ended.chain(changed.map(|(host, inner)| (*host, Some(*inner)))).collect();
        self.inner_hosts = inner_hosts;
        if !changes.is_empty() {
            self.handle_input(ControllerInput::InnerHosts(changes));
        }
    }
}
