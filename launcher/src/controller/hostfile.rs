//! The hostfile while its job runs: which hosts have come, and which are no longer in it.
use super::{
    HostTarget,
    watch::{Seen, watch},
};
use crate::discover::hosts::{ClusterHost, of_hostfile};
use contract::{
    hosts::{Host, MAX_HOSTFILE, MAX_HOSTS},
    job::{ClusterSpec, Hosts, JobSpec},
};
use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
};
use tokio::sync::mpsc;

/// Most names in a sentence.
const MOST_NAMED: usize = 8;

/// A job's hostfile and what filters it.
#[derive(Clone, Debug)]
pub struct HostFile {
    path: PathBuf,
    cluster: ClusterSpec,
}

impl HostFile {
    /// `None`: the job's hosts come from elsewhere.
    pub(crate) fn of(job: &JobSpec) -> Option<HostFile> {
        let Hosts::File(file) = &job.cluster.hosts else { return None };
        Some(HostFile { path: job.run.workdir.join(file), cluster: job.cluster.clone() })
    }

    fn read(&self, text: &str) -> Result<Vec<ClusterHost>, String> {
        let hosts = of_hostfile(&self.cluster, &self.path, text).map_err(|findings| {
            let more = match findings.len() {
                0 | 1 => String::new(),
                n => format!(" (and {} more)", n - 1),
            };
            findings.into_iter().next().map_or_else(String::new, |f| f.message) + &more
        })?;
        if hosts.is_empty() { Err("it leaves no host".to_owned()) } else { Ok(hosts) }
    }
}

/// What a changed hostfile means.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Change {
    /// For a person.
    pub(super) notices: Vec<String>,
    pub(super) hosts: Option<Changed>,
}

/// The hosts after a change.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Changed {
    pub(super) added: Vec<HostTarget>,
    /// Which of those that were known are in the file.
    pub(super) listed: Vec<bool>,
    /// How those that are in the file are reached.
    pub(super) reached: Vec<Host>,
}

/// The watched hostfile of a run; without one nothing ever changes.
pub(super) struct Watched {
    file: Option<(HostFile, mpsc::Receiver<Seen>)>,
    /// Of all hosts that were ever known: is it in the file?
    listed: Vec<bool>,
    /// How each that is was written last.
    written: HashMap<String, Host>,
}

impl Watched {
    pub(super) fn start(file: Option<HostFile>, hosts: &[HostTarget]) -> Watched {
        let names: HashSet<String> = hosts.iter().map(|h| h.name.clone()).collect();
        let watched = |file: HostFile| {
            let (path, seen_as) = (file.path.clone(), file.clone());
            // A text that ends within a line, or that hosts are missing from, may be half written.
            let whole = move |text: &str| {
                let hosts = text.ends_with('\n').then(|| seen_as.read(text).ok()).flatten();
                hosts.is_some_and(|hosts| {
                    let there: HashSet<String> = hosts.iter().map(|h| h.host.name()).collect();
                    names.iter().all(|name| there.contains(name))
                })
            };
            (file, watch(path, MAX_HOSTFILE as u64, whole))
        };
        Watched { file: file.map(watched), listed: vec![true; hosts.len()], written: HashMap::new() }
    }

    /// The next time that the file says something else. May be dropped and called again.
    pub(super) async fn next(&mut self) -> Seen {
        let seen = match &mut self.file {
            Some((_, receiver)) => receiver.recv().await,
            None => None,
        };
        match seen {
            Some(seen) => seen,
            None => std::future::pending().await,
        }
    }

    /// Compares it with the hosts of the run, and gives those that are in it the slots that they have there now.
    pub(super) fn take_up(&mut self, hosts: &mut [HostTarget], seen: Seen) -> Change {
        let Some((file, _)) = &self.file else { return Change::default() };
        let name = file.path.display();
        let said = |notice: String| Change { notices: vec![notice], hosts: None };
        let text = match seen {
            Seen::Text(text) => text,
            Seen::Unreadable(why) => {
                return said(format!("the hostfile {name} can't be read ({why}): the run goes on as it is"));
            }
        };
        let found = match file.read(&text) {
            Ok(found) => found,
            Err(why) => {
                return said(format!(
                    "the hostfile has changed and is wrong, so the run goes on as it is: {why}"
                ));
            }
        };
        let known: HashMap<String, usize> =
            hosts.iter().enumerate().map(|(id, h)| (h.name.clone(), id)).collect();
        let new: Vec<&ClusterHost> = found.iter().filter(|h| !known.contains_key(&h.host.name())).collect();
        if hosts.len() + new.len() > MAX_HOSTS {
            return said(format!(
                "the hostfile {name} has brought this run to more than {MAX_HOSTS} hosts: left alone"
            ));
        }
        let mut listed = vec![false; hosts.len()];
        let mut resized = Vec::new();
        for host in &found {
            let Some(&id) = known.get(&host.host.name()) else { continue };
            listed[id] = true;
            let target = HostTarget { local: hosts[id].local, ..HostTarget::elsewhere(host) };
            if target != hosts[id] {
                resized.push(target.name.clone());
                hosts[id] = target;
            }
        }
        self.change(hosts, &new, &found, listed, resized)
    }

    fn change(
        &mut self,
        hosts: &[HostTarget],
        new: &[&ClusterHost],
        found: &[ClusterHost],
        listed: Vec<bool>,
        resized: Vec<String>,
    ) -> Change {
        let turned = |to: bool| {
            let both = self.listed.iter().zip(&listed).zip(hosts);
            let turned = both.filter(|((before, now), _)| **now == to && before != now);
            turned.map(|(_, host)| host.name.clone()).collect::<Vec<_>>()
        };
        let sentences = [
            ("new", new.iter().map(|h| h.host.name()).collect()),
            ("listed again", turned(true)),
            ("no longer listed", turned(false)),
            ("other slots from the next start on", resized),
        ];
        let parts: Vec<String> = sentences
            .iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(what, names)| format!("{what}: {}", few(names)))
            .collect();
        let written: HashMap<String, Host> = found.iter().map(|h| (h.host.name(), h.host.clone())).collect();
        let same = parts.is_empty() && (self.written.is_empty() || self.written == written);
        self.written = written;
        if same {
            return Change::default();
        }
        let notice = (!parts.is_empty()).then(|| format!("the hostfile has changed: {}", parts.join("; ")));
        self.listed.clone_from(&listed);
        self.listed.extend(new.iter().map(|_| true));
        Change {
            notices: notice.into_iter().collect(),
            hosts: Some(Changed {
                added: new.iter().map(|h| HostTarget::elsewhere(h)).collect(),
                listed,
                reached: found.iter().map(|h| h.host.clone()).collect(),
            }),
        }
    }
}

fn few(names: &[String]) -> String {
    match names.len().checked_sub(MOST_NAMED) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..MOST_NAMED].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run with these hosts of a file.
    fn run(cluster: &str, text: &str) -> (Watched, Vec<HostTarget>) {
        let job = format!("run: {{command: [a]}}\ncluster: {cluster}");
        let source = contract::Source::Text { name: "job.yaml".into(), text: job };
        let file = HostFile::of(&contract::load(source, &[]).expect("a job").0).expect("a hostfile");
        let hosts: Vec<HostTarget> =
            file.read(text).expect("hosts").iter().map(HostTarget::elsewhere).collect();
        let listed = vec![true; hosts.len()];
        (Watched { file: Some((file, mpsc::channel(1).1)), listed, written: HashMap::new() }, hosts)
    }

    fn take(
        watched: &mut Watched,
        hosts: &mut Vec<HostTarget>,
        text: &str,
    ) -> (Vec<String>, Option<Vec<bool>>) {
        let change = watched.take_up(hosts, Seen::Text(text.to_owned()));
        let listed = change.hosts.map(|changed| {
            hosts.extend(changed.added);
            changed.listed
        });
        (change.notices, listed)
    }

    #[test]
    fn hosts_come_and_go_and_come_again() {
        let (mut watched, mut hosts) = run("{hosts: {file: hosts}}", "a slots=2\nb slots=2\n");
        let mut next = |text: &str| take(&mut watched, &mut hosts, text);
        let said = |text: &str| vec![format!("the hostfile has changed: {text}")];
        assert_eq!(next("# as it was\na slots=2\nb slots=2\n"), (vec![], None));
        assert_eq!(
            next("c slots=1\nb slots=2\n"),
            (said("new: c; no longer listed: a"), Some(vec![false, true]))
        );
        assert_eq!(
            next("a slots=2\nb slots=4\nc slots=1\n"),
            (said("listed again: a; other slots from the next start on: b"), Some(vec![true, true, true]))
        );
        let many: String = (0..12).map(|i| format!("n{i}\n")).collect();
        let (notices, _) = next(&format!("a slots=2\nb slots=4\nc slots=1\n{many}"));
        assert_eq!(notices, said("new: n0, n1, n2, n3, n4, n5, n6, n7 and 4 more"));
        let names: Vec<&str> = hosts.iter().take(4).map(|h| h.name.as_str()).collect();
        assert_eq!((names, hosts[1].slots), (vec!["a", "b", "c", "n0"], Some(4)));
    }

    #[test]
    fn another_way_to_a_host_is_learnt_without_a_word() {
        let (mut watched, mut hosts) = run("{hosts: {file: hosts}}", "a\nb\n");
        take(&mut watched, &mut hosts, "a\nb\nc\n");
        let change = watched.take_up(&mut hosts, Seen::Text("me@a\nb\nc\n".to_owned()));
        let changed = change.hosts.expect("a change");
        assert!(change.notices.is_empty() && changed.added.is_empty(), "{change:?}", change = change.notices);
        assert_eq!(changed.reached[0].user.as_deref(), Some("me"));
    }

    #[test]
    fn filters_hold_and_what_is_broken_changes_nothing() {
        let (mut watched, mut hosts) = run("{hosts: {file: hosts}, exclude: [b]}", "a\nb\nc\n");
        let before = hosts.clone();
        let mut next = |text: &str| take(&mut watched, &mut hosts, text);
        assert_eq!(next("a\nb\nc\nd\n").0, ["the hostfile has changed: new: d"]);
        for (text, part) in [
            ("a\nb\nb slots=\n", "hosts:3:"),
            ("", "names no host"),
            ("a\nc\n", "`b`"),
            ("a slots=0\nb\n", "hosts:1:"),
            ("b\n", "no host"),
        ] {
            let (notices, listed) = next(text);
            assert!(listed.is_none() && notices.len() == 1, "{text}: {notices:?}");
            assert!(notices[0].contains("is wrong") && notices[0].contains(part), "{text}: {notices:?}");
        }
        let gone = watched.take_up(&mut hosts, Seen::Unreadable("it is gone".to_owned()));
        let said = &gone.notices[0];
        assert!(said.ends_with("hosts can't be read (it is gone): the run goes on as it is"), "{said}");
        assert_eq!(hosts[..2], before[..]);
    }

    #[test]
    fn a_run_has_a_limit_of_hosts() {
        let (mut watched, mut hosts) = run("{hosts: {file: hosts}}", "a\n");
        let (notices, listed) = take(&mut watched, &mut hosts, &format!("n[1-{MAX_HOSTS}]\n"));
        assert!(listed.is_none() && notices[0].contains("more than 16384 hosts"), "{notices:?}");
    }
}
