//! The rendezvous store without sockets, for fuzz targets and tests with untrusted input.
use super::{
    StoreClientError,
    core::{ClientId, RendezvousStore},
    wire::{self, RequestParseOutcome},
};
use std::collections::BTreeMap;

/// The number of simulated clients of the rendezvous store to which a fuzz test assigns the pieces
/// of its untrusted input.
const CLIENT_COUNT: u8 = 4;

/// Lets several simulated clients send requests from the untrusted bytes `bytes` to a new
/// rendezvous store, and then disconnects them. Then disconnects all clients. Each turn is one byte
/// that selects the client, one byte with a length, and that many bytes of requests. Returns the
/// first error of a client.
pub(crate) fn serve_untrusted_clients(mut bytes: &[u8]) -> Result<(), StoreClientError> {
    let mut store = RendezvousStore::default();
    let mut clients: BTreeMap<ClientId, Vec<u8>> = BTreeMap::new();
    let mut first_error = Ok(());
    while let [selector, length, rest @ ..] = bytes {
        let (sent, later) = rest.split_at(usize::from(*length).min(rest.len()));
        bytes = later;
        let client = ClientId::from(selector % CLIENT_COUNT);
        let input = clients.entry(client).or_default();
        input.extend_from_slice(sent);
        if let Err(error) = handle_requests(&mut store, client, input) {
            store.end_wait(client);
            clients.remove(&client);
            first_error = first_error.and(Err(error));
        }
    }
    clients.keys().for_each(|client| store.end_wait(*client));
    first_error
}

/// Executes all complete requests in the input of one simulated client on the rendezvous store, and
/// removes them from the input. Encodes the replies and drops them. Fails if a request is not
/// valid. Panics if the parser asks for no more bytes than `input` has, because a connection would
/// then loop forever.
fn handle_requests(
    store: &mut RendezvousStore,
    client: ClientId,
    input: &mut Vec<u8>,
) -> Result<(), StoreClientError> {
    let (mut consumed, mut replies, mut sent) = (0, Vec::new(), Vec::new());
    loop {
        match wire::parse_request(&input[consumed..]) {
            RequestParseOutcome::Complete(request, length) => {
                consumed += length;
                store.handle_request(client, request, &mut replies)?;
                replies.drain(..).for_each(|(_, reply)| wire::encode_reply(&reply, &mut sent));
                sent.clear();
            }
            RequestParseOutcome::Incomplete(needed) => {
                // A connection that waits for bytes that it already has would loop forever.
                assert!(needed > input.len() - consumed, "{needed} of {}", input.len() - consumed);
                break;
            }
            RequestParseOutcome::Malformed(error) => return Err(error),
        }
    }
    input.drain(..consumed);
    Ok(())
}
