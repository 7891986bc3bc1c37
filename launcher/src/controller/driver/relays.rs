//! Observes through which hosts the messages of other hosts arrive (see
//! [`crate::cluster::RemoteConnection::tree_route`]).
use super::ControllerDriver;
use crate::{
    cluster::AgentHandle,
    controller::core::{ControllerInput, HostIndex},
};
use std::collections::HashMap;

impl ControllerDriver {
    /// Passes the changes of the ways through the tree of agents to the controller's state machine.
    /// Does nothing without a tree.
    pub(super) fn update_relays(&mut self) {
        let routes = self.agents.iter().filter_map(|(host, agent)| match &agent.handle {
            AgentHandle::Connection(connection) => Some((*host, connection.tree_route()?)),
            AgentHandle::Child(_) => None,
        });
        let routes: HashMap<HostIndex, _> = routes.collect();
        if routes.is_empty() && self.relays.is_empty() {
            return;
        }
        let hosts: HashMap<u64, HostIndex> =
            routes.iter().map(|(host, route)| (route.agent, *host)).collect();
        let relayed = routes.iter().filter(|(_, route)| route.first != route.agent);
        let relays: HashMap<HostIndex, HostIndex> =
            relayed.filter_map(|(host, route)| Some((*host, *hosts.get(&route.first)?))).collect();
        let ended = self.relays.keys().filter(|host| !relays.contains_key(*host)).map(|host| (*host, None));
        let changed = relays.iter().filter(|(host, relay)| self.relays.get(*host) != Some(*relay));
        let changes: Vec<_> = ended.chain(changed.map(|(host, relay)| (*host, Some(*relay)))).collect();
        self.relays = relays;
        if !changes.is_empty() {
            self.handle_input(ControllerInput::Relays(changes));
        }
    }
}
