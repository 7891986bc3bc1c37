//! The questions to the agents and their answers, all hosts at once.
use super::Started;
use crate::{
    link::{Outbox, Priority, read_into, write_from},
    transport::{Carrier, Connection, Refusal, ssh::Stage},
};
use contract::{
    control::{FromAgent, ToAgent, VERSION},
    probe::{MAX_PEERS, NodeLook, Peer, Probe, Probed},
};
use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{io::AsyncReadExt, sync::mpsc, task::spawn_local, time::timeout};

/// For an agent that runs to answer a question.
const ANSWER: Duration = Duration::from_secs(30);
/// Most that is kept of what an agent says on stderr, bytes.
const MAX_TALK: u64 = 4 << 10;
/// Neighbours that each host connects to, beside the first host.
const NEIGHBOURS: usize = 4;

/// What each host is to look at.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// Where the job will write, absolute.
    pub(super) dirs: Vec<PathBuf>,
    /// Of a job that trains on GPUs: its own folders of libraries, absolute.
    pub(super) cuda: Option<Vec<PathBuf>>,
}

/// How long to wait.
pub(super) struct Limits {
    /// For a connection between two hosts, milliseconds.
    pub(super) reach_ms: u64,
}

/// What came of one host.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) name: String,
    /// The last stage that was begun.
    pub(super) stage: Stage,
    pub(super) refusal: Option<Refusal>,
    pub(super) look: Option<NodeLook>,
    pub(super) skew: Option<(f64, f64)>,
    /// Peers it was to connect to.
    pub(super) peers: Vec<(String, Result<f64, String>)>,
    /// For each directory, the nonces it saw.
    pub(super) nonces: Vec<Vec<String>>,
    /// Its own.
    pub(super) nonce: String,
    /// What its login shell prints.
    pub(super) noise: String,
}

/// Asks all hosts; the answers in their order. Within a `LocalSet`.
pub(super) async fn ask(started: Vec<Started>, wanted: &Wanted, nonce: &str, limits: &Limits) -> Vec<Asked> {
    let mut looks = Vec::new();
    for (index, host) in started.into_iter().enumerate() {
        let nonce = format!("{nonce}-{index}");
        looks.push(spawn_local(look(host, wanted.clone(), nonce)));
    }
    let mut talks = Vec::new();
    for look in looks {
        // A task that panicked is a host that said nothing.
        talks.extend(look.await.ok());
    }
    let nonces: Vec<String> = talks.iter().map(|t| t.asked.nonce.clone()).collect();
    let peers: Vec<Option<Peer>> = talks.iter().map(|t| peer(&t.asked)).collect();
    let reaching: Vec<_> = talks
        .into_iter()
        .enumerate()
        .map(|(index, talk)| {
            spawn_local(reach(talk, neighbours(index, &peers), nonces.clone(), limits.reach_ms))
        })
        .collect();
    let mut done = Vec::new();
    for reach in reaching {
        done.extend(reach.await.ok());
    }
    // Only now the agents go, and with them their ports and nonce files.
    done.into_iter().map(|talk| talk.asked).collect()
}

/// A host that is being asked.
struct Talk {
    asked: Asked,
    host: Started,
    link: Option<Link>,
}

struct Link {
    outbox: Outbox<ToAgent>,
    inbox: mpsc::Receiver<((), Result<Option<FromAgent>, crate::link::LinkError>)>,
}

impl Link {
    /// The next message that `wanted` takes; an error where none comes.
    async fn wait<T>(
        &mut self,
        limit: Option<Duration>,
        wanted: impl Fn(FromAgent) -> Option<T>,
    ) -> Result<T, String> {
        let next = async {
            loop {
                match self.inbox.recv().await {
                    Some(((), Ok(Some(FromAgent::Failed { message, .. })))) => return Err(message),
                    Some(((), Ok(Some(message)))) => {
                        if let Some(value) = wanted(message) {
                            return Ok(value);
                        }
                    }
                    Some(((), Err(error))) => return Err(error.to_string()),
                    Some(((), Ok(None))) | None => return Err("the agent ended".to_owned()),
                }
            }
        };
        match limit {
            None => next.await,
            Some(limit) => timeout(limit, next)
                .await
                .unwrap_or_else(|_| Err(format!("no answer from the agent within {} s", limit.as_secs()))),
        }
    }
}

async fn look(mut host: Started, wanted: Wanted, nonce: String) -> Talk {
    let mut asked = Asked {
        name: host.name.clone(),
        stage: Stage::Agent,
        refusal: None,
        look: None,
        skew: None,
        peers: Vec::new(),
        nonces: Vec::new(),
        nonce: nonce.clone(),
        noise: String::new(),
    };
    let mut link = None;
    let mut said = None;
    if let Ok(agent) = &mut host.agent {
        let (outbox, outgoing) = Outbox::new();
        let (sender, inbox) = mpsc::channel(16);
        // Their halves of the streams; what stays behind in `agent` is its carrier.
        let input = std::mem::replace(&mut agent.input, Box::new(tokio::io::sink()));
        let output = std::mem::replace(&mut agent.output, Box::new(tokio::io::empty()));
        let talk = std::mem::replace(&mut agent.talk, Box::new(tokio::io::empty()));
        tokio::spawn(read_into((), output, sender));
        tokio::spawn(write_from(input, outgoing));
        said = Some(tokio::spawn(async move {
            let mut text = Vec::new();
            _ = talk.take(MAX_TALK).read_to_end(&mut text).await;
            String::from_utf8_lossy(&text).trim().to_owned()
        }));
        link = Some(Link { outbox, inbox });
    }
    let result = match &mut link {
        Some(link) => questions(link, wanted, nonce).await,
        None => Err("it could not be started".to_owned()),
    };
    match result {
        Ok((look, skew)) => (asked.look, asked.skew) = (Some(look), Some(skew)),
        Err(why) => asked.refusal = Some(refusal(&host, why, said).await),
    }
    if let Some(progress) = &host.progress {
        (asked.stage, asked.noise) = (progress.stage(), progress.noise());
    }
    Talk { asked, host, link }
}

/// Why a host gave no answer.
async fn refusal(host: &Started, why: String, said: Option<tokio::task::JoinHandle<String>>) -> Refusal {
    if let Some(refusal) = host.progress.as_ref().and_then(|p| p.refusal()) {
        return refusal;
    }
    if let Some(Carrier::Connection(connection)) = host.agent.as_ref().ok().map(|a| &a.carrier) {
        if let Some(refusal) = connection.why() {
            return refusal;
        }
        Connection::break_off(connection.as_ref());
    }
    let said = match said {
        Some(task) => {
            timeout(Duration::from_secs(1), task).await.ok().and_then(Result::ok).unwrap_or_default()
        }
        None => String::new(),
    };
    let why = host.agent.as_ref().err().map_or(why, ToString::to_string);
    let said = if said.is_empty() { said } else { format!(": it said \"{}\"", said.replace('\n', " / ")) };
    Refusal { message: format!("{}: {why}{said}", host.name), hint: None }
}

async fn questions(
    link: &mut Link,
    Wanted { dirs, cuda }: Wanted,
    nonce: String,
) -> Result<(NodeLook, (f64, f64)), String> {
    link.outbox.send(Priority::Must, ToAgent::Hello { version: VERSION });
    // Getting connected has limits of its own, and ends the stream when it fails.
    let version = link.wait(None, |m| match m {
        FromAgent::Hello { version, .. } => Some(version),
        _ => None,
    });
    let version = version.await?;
    if version != VERSION {
        return Err(format!("the agent speaks version {version} of the protocol, not {VERSION}"));
    }
    link.outbox.send(Priority::Must, ToAgent::Probe(Probe::Look { nonce, dirs, cuda }));
    let sent = unix_seconds();
    let look = link.wait(Some(ANSWER), |m| match m {
        FromAgent::Probed(Probed::Look(look)) => Some(look),
        _ => None,
    });
    let look = look.await?;
    let (taken, theirs) = (unix_seconds() - sent, look.unix_ns as f64 / 1e9);
    // The agent looks at its clock last; the answer was on its way for less than the whole.
    let skew = theirs - (sent + taken);
    Ok((*look, (skew, taken)))
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn peer(asked: &Asked) -> Option<Peer> {
    let look = asked.look.as_ref()?;
    let port = look.port?;
    let addresses = look.interfaces.iter().map(|(_, ip)| SocketAddr::new(*ip, port)).collect();
    Some(Peer { name: asked.name.clone(), addresses, greeting: look.greeting.clone() })
}

/// All others of a few hosts; of many, the first and the next ones.
fn neighbours(index: usize, peers: &[Option<Peer>]) -> Vec<Peer> {
    let count = peers.len();
    let near = |other: usize| other == 0 || (1..=NEIGHBOURS).contains(&((other + count - index) % count));
    let others = (0..count).filter(|other| *other != index && (count <= 16 || near(*other)));
    others.filter_map(|other| peers.get(other)?.clone()).take(MAX_PEERS).collect()
}

async fn reach(mut talk: Talk, peers: Vec<Peer>, nonces: Vec<String>, timeout_ms: u64) -> Talk {
    if talk.asked.look.is_none() {
        return talk;
    }
    let Some(link) = &mut talk.link else { return talk };
    link.outbox.send(Priority::Must, ToAgent::Probe(Probe::Reach { peers, nonces, timeout_ms }));
    let limit = ANSWER + Duration::from_millis(timeout_ms * 8);
    let answer = link.wait(Some(limit), |m| match m {
        FromAgent::Probed(Probed::Reach { peers, nonces }) => Some((peers, nonces)),
        _ => None,
    });
    match answer.await {
        Ok((peers, nonces)) => (talk.asked.peers, talk.asked.nonces) = (peers, nonces),
        Err(why) => talk.asked.refusal = Some(refusal(&talk.host, why, None).await),
    }
    talk
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_hosts_each_asks_the_first_and_the_next() {
        let peer =
            |i: usize| Some(Peer { name: i.to_string(), addresses: Vec::new(), greeting: String::new() });
        let names = |index, count| -> Vec<String> {
            neighbours(index, &(0..count).map(peer).collect::<Vec<_>>()).into_iter().map(|p| p.name).collect()
        };
        assert_eq!(names(1, 3), ["0", "2"]);
        assert_eq!(names(20, 100), ["0", "21", "22", "23", "24"]);
        assert_eq!(names(98, 100), ["0", "1", "2", "99"]);
        assert_eq!(names(0, 1), [""; 0]);
    }
}
