//! The store without its sockets, fed by strangers: for fuzz targets and hostile tests.
use super::{
    core::{Client, Store},
    wire::{self, Parsed},
};
use std::collections::BTreeMap;

/// Connections that a fuzzed input has.
const CLIENTS: u8 = 4;

/// What some clients send in turn: a byte that says who, one that says how much, and that many bytes; then all leave.
/// The error is the first why one of them was sent away.
pub(crate) fn serve(mut bytes: &[u8]) -> Result<(), String> {
    let mut store = Store::default();
    let mut clients: BTreeMap<Client, Vec<u8>> = BTreeMap::new();
    let mut said = Ok(());
    while let [who, length, rest @ ..] = bytes {
        let (sent, later) = rest.split_at(usize::from(*length).min(rest.len()));
        bytes = later;
        let client = Client::from(who % CLIENTS);
        let input = clients.entry(client).or_default();
        input.extend_from_slice(sent);
        if let Err(why) = carry_out(&mut store, client, input) {
            store.leave(client);
            clients.remove(&client);
            said = said.and(Err(why));
        }
    }
    clients.keys().for_each(|client| store.leave(*client));
    said
}

/// As a connection does it; replies are made and thrown away.
fn carry_out(store: &mut Store, client: Client, input: &mut Vec<u8>) -> Result<(), String> {
    let (mut at, mut replies, mut sent) = (0, Vec::new(), Vec::new());
    loop {
        match wire::parse(&input[at..]) {
            Parsed::Whole(request, length) => {
                at += length;
                store.handle(client, request, &mut replies)?;
                replies.drain(..).for_each(|(_, reply)| wire::encode(&reply, &mut sent));
                sent.clear();
            }
            Parsed::Part(need) => {
                // Whoever waits for bytes waits for more than there are, or it would go round in circles.
                assert!(need > input.len() - at, "{need} of {}", input.len() - at);
                break;
            }
            Parsed::Malformed(why) => return Err(why),
        }
    }
    input.drain(..at);
    Ok(())
}
