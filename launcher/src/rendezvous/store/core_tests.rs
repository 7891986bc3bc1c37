//! Tests of the store's state: requests, waits and barriers.
use super::{super::wire::tests::any_request, *};
use proptest::prelude::*;

/// Converts a text to the bytes of a key or value.
fn to_bytes(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}

/// Executes a request of a client and returns the replies to all clients. Panics if the store
/// rejects the request.
fn send_request(store: &mut RendezvousStore, client: ClientId, request: StoreRequest) -> ClientReplies {
    let mut out = Vec::new();
    store.handle_request(client, request, &mut out).expect("executed");
    out
}

/// Executes a request of client 1, to which the store must send exactly one reply, and returns the
/// reply. Panics if the store sends another number of replies.
fn request_reply(store: &mut RendezvousStore, request: StoreRequest) -> StoreReply {
    let mut replies = send_request(store, 1, request);
    assert_eq!(replies.len(), 1, "{replies:?}");
    replies.remove(0).1
}

#[test]
fn each_operation_is_answered_like_by_torchs_server() {
    use StoreRequest::*;
    let store = &mut RendezvousStore::default();
    let value = |text: &str| StoreReply::Value(to_bytes(text));
    for (request, reply) in [
        (Ping(77), StoreReply::Nonce(77)),
        (Get(to_bytes("a")), value("")),
        (Check(vec![to_bytes("a")]), StoreReply::Byte(1)),
        (Add(to_bytes("n"), 5), StoreReply::Number(5)),
        (Add(to_bytes("n"), -7), StoreReply::Number(-2)),
        (Get(to_bytes("n")), value("-2")),
        (CompareSet(to_bytes("c"), to_bytes("x"), to_bytes("y")), value("x")),
        (CountKeys, StoreReply::Number(1)),
        (CompareSet(to_bytes("c"), to_bytes(""), to_bytes("y")), value("y")),
        (CompareSet(to_bytes("c"), to_bytes("z"), to_bytes("w")), value("y")),
        (CompareSet(to_bytes("c"), to_bytes("y"), to_bytes("w")), value("w")),
        (
            GetMany(vec![to_bytes("c"), to_bytes("none"), to_bytes("n")]),
            StoreReply::Values(vec![to_bytes("w"), to_bytes(""), to_bytes("-2")]),
        ),
        (ListKeys, StoreReply::Keys(vec![to_bytes("c"), to_bytes("n")])),
        (Delete(to_bytes("c")), StoreReply::Number(1)),
        (Delete(to_bytes("c")), StoreReply::Number(0)),
        (CancelWait, StoreReply::Byte(1)),
        (Wait(vec![to_bytes("n"), to_bytes("n")]), StoreReply::Byte(0)),
        (Wait(vec![]), StoreReply::Byte(0)),
        (Pop(to_bytes("q")), StoreReply::Number(0)),
        (QueueLength(to_bytes("q")), StoreReply::Number(0)),
        (Barrier(to_bytes("bar"), 1), StoreReply::Byte(0)),
        (Barrier(to_bytes("bar"), 1), StoreReply::Byte(0)),
    ] {
        assert_eq!(request_reply(store, request.clone()), reply, "{request:?}");
    }
    for silent in [
        Validate,
        Set(to_bytes("s"), to_bytes("1")),
        Append(to_bytes("s"), to_bytes("2")),
        SetMany(vec![(to_bytes("t"), to_bytes("3"))]),
    ] {
        assert_eq!(send_request(store, 1, silent), []);
    }
    assert_eq!(
        request_reply(store, GetMany(vec![to_bytes("s"), to_bytes("t")])),
        StoreReply::Values(vec![to_bytes("12"), to_bytes("3")])
    );
    for item in ["1", "2"] {
        send_request(store, 1, Push(to_bytes("q"), to_bytes(item)));
    }
    assert_eq!(request_reply(store, QueueLength(to_bytes("q"))), StoreReply::Number(2));
    assert_eq!(request_reply(store, Check(vec![to_bytes("q")])), StoreReply::Byte(0));
    assert_eq!(request_reply(store, Delete(to_bytes("q"))), StoreReply::Number(0), "queues are not deleted");
    assert_eq!(request_reply(store, Pop(to_bytes("q"))), StoreReply::Popped(2, to_bytes("1")));
    assert_eq!(request_reply(store, Pop(to_bytes("q"))), StoreReply::Popped(1, to_bytes("2")));
}

#[test]
fn a_waiting_client_is_woken_once() {
    let store = &mut RendezvousStore::default();
    assert_eq!(send_request(store, 1, StoreRequest::Wait(vec![to_bytes("a"), to_bytes("c")])), []);
    assert_eq!(send_request(store, 2, StoreRequest::Wait(vec![to_bytes("c")])), []);
    assert_eq!(send_request(store, 3, StoreRequest::Set(to_bytes("a"), to_bytes(""))), []);
    assert_eq!(
        send_request(store, 3, StoreRequest::Set(to_bytes("c"), to_bytes(""))),
        [(1, StoreReply::Byte(0)), (2, StoreReply::Byte(0))]
    );
    assert_eq!(send_request(store, 3, StoreRequest::Set(to_bytes("c"), to_bytes(""))), []);
    // A client that cancelled or left is never woken.
    assert_eq!(send_request(store, 1, StoreRequest::Wait(vec![to_bytes("x")])), []);
    assert_eq!(send_request(store, 2, StoreRequest::Wait(vec![to_bytes("x")])), []);
    assert_eq!(send_request(store, 1, StoreRequest::CancelWait), [(1, StoreReply::Byte(1))]);
    store.end_wait(2);
    assert_eq!(send_request(store, 3, StoreRequest::Add(to_bytes("x"), 1)), [(3, StoreReply::Number(1))]);
    assert!(store.waiters.is_empty() && store.waiting.is_empty());
}

#[test]
fn one_item_wakes_one_client() {
    let store = &mut RendezvousStore::default();
    for client in [1, 2] {
        assert_eq!(send_request(store, client, StoreRequest::Wait(vec![to_bytes("q")])), []);
    }
    assert_eq!(
        send_request(store, 3, StoreRequest::Push(to_bytes("q"), to_bytes("i"))),
        [(1, StoreReply::Byte(0))]
    );
    assert_eq!(
        send_request(store, 3, StoreRequest::Push(to_bytes("q"), to_bytes("j"))),
        [(2, StoreReply::Byte(0))]
    );
}

#[test]
fn a_barrier_opens_for_all_at_once_and_stays_open() {
    let store = &mut RendezvousStore::default();
    for client in [1, 2] {
        assert_eq!(send_request(store, client, StoreRequest::Barrier(to_bytes("b"), 3)), []);
    }
    let woken = send_request(store, 3, StoreRequest::Barrier(to_bytes("b"), 3));
    assert_eq!(woken, [1, 2, 3].map(|client| (client, StoreReply::Byte(0))));
    assert_eq!(send_request(store, 4, StoreRequest::Barrier(to_bytes("b"), 3)), [(4, StoreReply::Byte(0))]);
    assert!(store.arrived.is_empty() && store.waiting.is_empty());
}

#[test]
fn an_invalid_request_is_rejected_and_changes_nothing() {
    let store = &mut RendezvousStore::default();
    send_request(store, 1, StoreRequest::Set(to_bytes("t"), to_bytes("text")));
    send_request(store, 1, StoreRequest::Set(to_bytes("m"), to_bytes(&i64::MAX.to_string())));
    let large = vec![0; MAX_VALUE_BYTES as usize];
    send_request(store, 1, StoreRequest::Set(to_bytes("l"), large.clone()));
    send_request(store, 1, StoreRequest::Wait(vec![to_bytes("never")]));
    for (request, expected) in [
        (StoreRequest::Add(to_bytes("t"), 1), StoreClientError::InvalidSum),
        (StoreRequest::Add(to_bytes("m"), 1), StoreClientError::InvalidSum),
        (StoreRequest::Append(to_bytes("l"), to_bytes("x")), StoreClientError::ValueTooLong),
        (
            StoreRequest::GetMany(vec![to_bytes("l"); 9]),
            StoreClientError::ReplyTooLong(9 * (8 + MAX_VALUE_BYTES as usize)),
        ),
        (StoreRequest::Wait(vec![to_bytes("other")]), StoreClientError::SecondWait),
        (StoreRequest::Barrier(to_bytes("b"), 2), StoreClientError::SecondWait),
    ] {
        let before = store.total_bytes();
        assert_eq!(store.handle_request(1, request, &mut Vec::new()), Err(expected));
        assert_eq!(store.total_bytes(), before);
    }
    store.bytes = MAX_STORE_BYTES - 10;
    for request in [
        StoreRequest::Push(to_bytes("q"), to_bytes("")),
        StoreRequest::Wait(vec![to_bytes("k")]),
        StoreRequest::Barrier(to_bytes("b"), 2),
    ] {
        assert_eq!(store.handle_request(2, request, &mut Vec::new()), Err(StoreClientError::StoreFull));
    }
}

/// A simple store without waits, with which tests compare [`RendezvousStore`].
#[derive(Default)]
struct ReferenceStore {
    values: BTreeMap<StoreKey, StoreValue>,
    queues: BTreeMap<StoreKey, Vec<StoreValue>>,
}

impl ReferenceStore {
    /// Executes a request and returns the immediate reply to the client, or `None` if the client
    /// gets no immediate reply.
    fn execute_request(&mut self, request: &StoreRequest) -> Option<StoreReply> {
        let value = |model: &ReferenceStore, k: &StoreKey| model.values.get(k).cloned().unwrap_or_default();
        let has = |model: &ReferenceStore, k: &StoreKey| {
            model.values.contains_key(k) || model.queues.get(k).is_some_and(|q| !q.is_empty())
        };
        match request {
            StoreRequest::Validate => return None,
            StoreRequest::Set(k, v) => _ = self.values.insert(k.clone(), v.clone()),
            StoreRequest::SetMany(pairs) => self.values.extend(pairs.iter().cloned()),
            StoreRequest::Append(k, v) => self.values.entry(k.clone()).or_default().extend(v),
            StoreRequest::Push(k, v) => self.queues.entry(k.clone()).or_default().push(v.clone()),
            StoreRequest::CompareSet(k, old, new) => {
                let now = self.values.get(k).cloned();
                if now.as_ref().map_or(old.is_empty(), |now| now == old) {
                    self.values.insert(k.clone(), new.clone());
                    return Some(StoreReply::Value(new.clone()));
                }
                return Some(StoreReply::Value(now.unwrap_or(old.clone())));
            }
            StoreRequest::Get(k) => return Some(StoreReply::Value(value(self, k))),
            StoreRequest::GetMany(keys) => {
                return Some(StoreReply::Values(keys.iter().map(|k| value(self, k)).collect()));
            }
            StoreRequest::Add(k, n) | StoreRequest::Barrier(k, n) => {
                let step = if matches!(request, StoreRequest::Add(..)) { *n } else { 1 };
                let text = self.values.get(k).map_or("0".into(), |v| String::from_utf8(v.clone()).unwrap());
                let sum = text.parse::<i64>().unwrap() + step;
                self.values.insert(k.clone(), to_bytes(&sum.to_string()));
                return match request {
                    StoreRequest::Add(..) => Some(StoreReply::Number(sum)),
                    _ => (sum >= *n).then_some(StoreReply::Byte(0)),
                };
            }
            StoreRequest::Check(keys) => {
                return Some(StoreReply::Byte(u8::from(!keys.iter().all(|k| has(self, k)))));
            }
            StoreRequest::Wait(keys) => {
                return keys.iter().all(|k| has(self, k)).then_some(StoreReply::Byte(0));
            }
            StoreRequest::CountKeys => {
                let queues = self.queues.values().filter(|q| !q.is_empty()).count();
                return Some(StoreReply::Number((self.values.len() + queues) as i64));
            }
            StoreRequest::ListKeys => return Some(StoreReply::Keys(self.values.keys().cloned().collect())),
            StoreRequest::Delete(k) => {
                return Some(StoreReply::Number(self.values.remove(k).is_some().into()));
            }
            StoreRequest::CancelWait => return Some(StoreReply::Byte(1)),
            StoreRequest::Ping(nonce) => return Some(StoreReply::Nonce(*nonce)),
            StoreRequest::QueueLength(k) => {
                return Some(StoreReply::Number(self.queues.get(k).map_or(0, Vec::len) as i64));
            }
            StoreRequest::Pop(k) => {
                let queue = self.queues.entry(k.clone()).or_default();
                return Some(match queue.len() {
                    0 => StoreReply::Number(0),
                    n => StoreReply::Popped(n as i64, queue.remove(0)),
                });
            }
        }
        None
    }
}

proptest! {
    /// Checks that any requests in any order get the replies of [`ReferenceStore`], and that the
    /// store counts its bytes correctly.
    #[test]
    fn any_requests_are_answered_like_by_the_reference_store(requests in proptest::collection::vec((0u64..4, any_request()), 0..60)) {
        let mut store = RendezvousStore::default();
        let mut model = ReferenceStore::default();
        let mut open = std::collections::BTreeMap::new();
        for (client, request) in requests {
            let waits = matches!(request, StoreRequest::Wait(_) | StoreRequest::Barrier(..));
            let mut out = Vec::new();
            if store.waiting.contains_key(&client) && waits {
                prop_assert!(store.handle_request(client, request, &mut out).is_err());
                continue;
            }
            let number = |k: &StoreKey| store.values.get(k).is_none_or(|v| std::str::from_utf8(v).unwrap().parse::<i64>().is_ok());
            if let StoreRequest::Add(k, _) | StoreRequest::Barrier(k, _) = &request && !number(k) {
                prop_assert!(store.handle_request(client, request, &mut out).is_err());
                continue;
            }
            prop_assert!(store.handle_request(client, request.clone(), &mut out).is_ok());
            let woken: Vec<ClientId> = out.iter().filter(|(c, _)| *c != client).map(|(c, _)| *c).collect();
            let replies: Vec<&StoreReply> = out.iter().filter(|(c, _)| *c == client).map(|(_, r)| r).collect();
            let expected = model.execute_request(&request);
            if waits && expected.is_none() {
                open.insert(client, request.clone());
            }
            for client in woken {
                prop_assert!(open.remove(&client).is_some(), "woken without waiting");
            }
            if let Some(reply) = expected {
                prop_assert_eq!(replies.last(), Some(&&reply), "{:?}", request);
            }
            if request == StoreRequest::CancelWait {
                open.remove(&client);
            } else if !waits && replies.len() > usize::from(has_direct_reply(&request)) {
                prop_assert!(open.remove(&client).is_some(), "the wait of the client itself ended");
            }
            prop_assert_eq!(store.waiting.len(), open.len());
        }
        let values: usize = store.values.iter().map(|(k, v)| compute_entry_bytes(k, v)).sum();
        let queues: usize = store.queues.iter().flat_map(|(k, q)| q.iter().map(|v| compute_entry_bytes(k, v))).sum();
        let mut waits = 0;
        for waiting in store.waiting.values() {
            waits += match waiting {
                ClientWait::Keys(keys, missing) => {
                    prop_assert_eq!(*missing, keys.iter().filter(|key| !store.contains_key(key)).count());
                    compute_wait_bytes(keys)
                }
                ClientWait::Barrier(key) => compute_wait_bytes(std::slice::from_ref(key)),
            };
        }
        prop_assert_eq!(store.total_bytes(), values + queues + waits);
        for client in 0..4 {
            store.end_wait(client);
        }
        prop_assert!(store.waiting.is_empty() && store.waiters.is_empty() && store.arrived.is_empty());
    }
}

/// Returns whether the store replies to a request of this kind. Replies to waits that the request
/// ends do not count.
fn has_direct_reply(request: &StoreRequest) -> bool {
    !matches!(
        request,
        StoreRequest::Validate
            | StoreRequest::Set(..)
            | StoreRequest::SetMany(_)
            | StoreRequest::Append(..)
            | StoreRequest::Push(..)
    )
}
