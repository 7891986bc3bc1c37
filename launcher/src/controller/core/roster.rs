//! The list of hosts changes while the job runs: who comes is a spare, who isn't listed any more is let go when the others
//! are enough.
use super::{Core, HostSetup, HostIndex, Output, State, hosts::Link, hosts::Node};
use std::time::Duration;

impl Core {
    pub(super) fn list(&mut self, now: Duration, added: Vec<HostSetup>, listed: &[bool]) {
        for (id, listed) in (0..self.nodes.len()).zip(listed) {
            let node = &mut self.nodes[id];
            match (node.unlisted, *listed) {
                (false, false) => (node.unlisted, node.kept) = (true, false),
                (true, true) => self.list_again(now, id),
                _ => {}
            }
        }
        for setup in added {
            self.any_remote |= setup.remote;
            self.setup.hosts.push(setup);
            self.nodes.push(Node::default());
            self.invite(now, self.nodes.len() - 1);
        }
        self.unlisted = self.nodes.iter().filter(|n| n.unlisted && !n.left_out).count();
        if self.setup.use_all {
            let listed = self.nodes.iter().filter(|n| !n.unlisted).count();
            self.setup.use_hosts = listed.max(self.setup.min_hosts);
        }
        if self.state == State::Joining {
            self.count_again();
        }
        self.release(now);
        self.try_prepare(now);
    }

    /// A host that had been taken from the list: it was mended, or it was a mistake.
    fn list_again(&mut self, now: Duration, id: HostIndex) {
        let node = &mut self.nodes[id];
        (node.unlisted, node.left_out, node.failures) = (false, false, 0);
        if node.link == Link::Away {
            self.invite(now, id);
        }
    }

    /// Starts an agent there, unless the job ends: what follows then, if anything, starts it.
    fn invite(&mut self, now: Duration, id: HostIndex) {
        if !matches!(self.state, State::Stopping(_) | State::Ending | State::Over) {
            self.start_agent(now, id);
        }
    }

    /// Lets hosts go that are no longer listed, the last first, as far as the others are enough. Their workers are ended
    /// first, by a start without them.
    pub(super) fn release(&mut self, now: Duration) {
        if self.unlisted == 0 {
            return;
        }
        // While hosts join, who has been started may come; later, only who is there counts.
        let joining = self.state == State::Joining;
        let there = |n: &Node| !n.left_out && (n.link == Link::Joined || joining && n.link == Link::Greeting);
        let count = self.nodes.iter().filter(|n| there(n)).count();
        let mut more = count.saturating_sub(self.setup.min_hosts);
        let (mut idle, mut busy) = (Vec::new(), Vec::new());
        for id in (0..self.nodes.len()).rev() {
            let node = &self.nodes[id];
            if !node.unlisted || node.left_out {
                continue;
            }
            match (there(node), more) {
                (true, 0) => self.keep(id),
                (is_there, _) => {
                    more -= usize::from(is_there);
                    if node.active { busy.push(id) } else { idle.push(id) }
                }
            }
        }
        let members_go = self.state == State::Preparing && idle.iter().any(|id| self.members.contains(id));
        idle.into_iter().for_each(|id| self.let_go(id));
        if members_go {
            // A plan that is being made is of no use any more.
            (self.state, self.limit) = (State::Joining, None);
            self.epoch += 1;
        }
        if self.state == State::Joining {
            self.count_again();
            self.try_prepare(now);
        }
        // Who was told to stop before all workers run might miss it.
        let run = self.state == State::Running && self.suspect.is_none();
        if run && !busy.is_empty() && self.workers.iter().all(|w| w.pid.is_some()) {
            self.drain(now, &busy);
        }
    }

    fn keep(&mut self, id: HostIndex) {
        if !std::mem::replace(&mut self.nodes[id].kept, true) {
            let (place, needed) = (self.place(id), self.setup.min_hosts);
            self.notice(format!(
                "{place} isn't listed any more and is used all the same: the job needs {needed} hosts \
                 (`run.min_hosts`) and has no other"
            ));
        }
    }

    /// No process of the job is there.
    fn let_go(&mut self, id: HostIndex) {
        self.unlisted -= 1;
        let node = &mut self.nodes[id];
        node.left_out = true;
        if node.heard_of() {
            node.link = Link::Away;
            self.out.push(Output::ReleaseAgent(id));
        }
        let place = self.place(id);
        self.notice(format!("{place} isn't listed any more: it is left out"));
    }

    /// All workers stop, to go on without these hosts.
    fn drain(&mut self, now: Duration, going: &[HostIndex]) {
        self.state = State::Draining(false);
        self.tell_to_stop(now);
        let names: Vec<&str> = going.iter().rev().map(|id| self.setup.hosts[*id].name.as_str()).collect();
        let names = names.join(", ");
        self.notice(if self.setup.builtin {
            format!("no longer listed: {names}; the workers save at the next step boundary, and start again without")
        } else {
            let grace = self.setup.grace.as_secs_f64();
            format!("no longer listed: {names}; the workers got SIGTERM, have {grace} s, and start again without")
        });
    }

    /// A host that was to go is gone before its workers had stopped: the others can't finish together.
    pub(super) fn cut_short(&mut self, now: Duration, text: &str) {
        self.notice(format!("{text}; it isn't listed any more, and the job goes on without it"));
        if self.state == State::Draining(false) {
            self.state = State::Draining(true);
            let grace = if self.setup.builtin { super::ABORT_GRACE } else { self.setup.grace };
            self.kill(now, text, grace, false);
        }
    }
}
