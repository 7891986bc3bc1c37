//! An agent whose stdin and stdout can't carry the control stream connects to its controller instead.
use crate::link::join::{EXCHANGE, Introduced, Invitation, introduce};
use contract::env;
use std::{
    fs::{self, File},
    io,
    net::SocketAddr,
    os::fd::OwnedFd,
    time::Duration,
};
use tokio::{net::TcpStream, task::JoinSet, time::sleep, time::timeout};

/// Between the beginnings of attempts at one address after the other.
const STAGGER: Duration = Duration::from_millis(200);
/// For an address to answer.
const CONNECT: Duration = Duration::from_secs(10);

/// Reads the invitation from stdin and connects; both directions of the control stream.
pub(super) fn join(stdin: OwnedFd) -> io::Result<(OwnedFd, OwnedFd)> {
    let invitation = Invitation::read(&mut File::from(stdin))?;
    let name = node_name();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stream = runtime.block_on(connect(&invitation, &name))?.into_std()?;
    Ok((stream.try_clone()?.into(), stream.into()))
}

/// The name by which the controller waits for this host.
fn node_name() -> String {
    let slurm = std::env::var(env::SLURMD_NODENAME).ok().filter(|name| !name.is_empty());
    slurm.unwrap_or_else(|| {
        fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
    })
}

/// The first of the addresses behind which the controller is.
async fn connect(invitation: &Invitation, name: &str) -> io::Result<TcpStream> {
    let mut attempts = JoinSet::new();
    for (i, address) in invitation.addresses.iter().copied().enumerate() {
        let (key, name) = (invitation.key.clone(), name.to_owned());
        attempts.spawn(async move {
            sleep(STAGGER * i as u32).await;
            let attempt = async {
                let stream = timeout(CONNECT, TcpStream::connect(address)).await??;
                stream.set_nodelay(true)?;
                timeout(EXCHANGE, introduce(stream, &key, &name)).await?
            };
            attempt.await.map_err(|error: io::Error| (address, error))
        });
    }
    let mut failed: Vec<(SocketAddr, io::Error)> = Vec::new();
    while let Some(ended) = attempts.join_next().await {
        match ended {
            // The others aren't confirmed, and so never become a control stream.
            Ok(Ok(known)) => return Introduced::confirm(known).await,
            Ok(Err(failure)) => failed.push(failure),
            Err(error) => return Err(io::Error::other(error)),
        }
    }
    let each: Vec<String> = failed.iter().map(|(address, error)| format!("{address}: {error}")).collect();
    Err(io::Error::other(format!(
        "{name} can't reach the controller at any of its addresses ({}); is a firewall between the nodes?",
        each.join("; ")
    )))
}

/// Removes the file that this process runs: a copy that was made for it alone. Workers are started from what is open.
pub(super) fn remove_own_file() {
    if let Ok(file) = fs::read_link("/proc/self/exe") {
        // Left behind, it is only a file too many.
        _ = fs::remove_file(file);
    }
}
