//! The store without sockets, for fuzz targets and tests with untrusted input.
use super::{
    ClientError,
    core::{Client, Store},
    wire::{self, Parsed},
};
use std::collections::BTreeMap;

/// Clients that take turns in the input.
const CLIENTS: u8 = 4;

/// Serves what several clients send in turn: one byte that selects the client, one that is a
/// length, and that many bytes; then all clients leave. Returns the first error of a client.
pub(crate) fn serve(mut bytes: &[u8]) -> Result<(), ClientError> {
    let mut store = Store::default();
    let mut clients: BTreeMap<Client, Vec<u8>> = BTreeMap::new();
    let mut first_error = Ok(());
    while let [selector, length, rest @ ..] = bytes {
        let (sent, later) = rest.split_at(usize::from(*length).min(rest.len()));
        bytes = later;
        let client = Client::from(selector % CLIENTS);
        let input = clients.entry(client).or_default();
        input.extend_from_slice(sent);
        if let Err(error) = handle_requests(&mut store, client, input) {
            store.remove_client(client);
            clients.remove(&client);
            first_error = first_error.and(Err(error));
        }
    }
    clients.keys().for_each(|client| store.remove_client(*client));
    first_error
}

/// Handles every complete request, like a connection does; replies are encoded and dropped.
fn handle_requests(store: &mut Store, client: Client, input: &mut Vec<u8>) -> Result<(), ClientError> {
    let (mut at, mut replies, mut sent) = (0, Vec::new(), Vec::new());
    loop {
        match wire::parse(&input[at..]) {
            Parsed::Complete(request, length) => {
                at += length;
                store.handle(client, request, &mut replies)?;
                replies.drain(..).for_each(|(_, reply)| wire::encode(&reply, &mut sent));
                sent.clear();
            }
            Parsed::Incomplete(needed) => {
                // A connection that waits for bytes that it already has would loop forever.
                assert!(needed > input.len() - at, "{needed} of {}", input.len() - at);
                break;
            }
            Parsed::Malformed(error) => return Err(error),
        }
    }
    input.drain(..at);
    Ok(())
}
