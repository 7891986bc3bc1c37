use super::{super::wire::tests::any_request, *};
use proptest::prelude::*;

fn b(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}

fn ask(store: &mut Store, client: Client, request: Request) -> Replies {
    let mut out = Vec::new();
    store.handle(client, request, &mut out).expect("executed");
    out
}

fn one(store: &mut Store, request: Request) -> Reply {
    let mut replies = ask(store, 1, request);
    assert_eq!(replies.len(), 1, "{replies:?}");
    replies.remove(0).1
}

#[test]
fn each_operation_is_answered_like_by_torchs_server() {
    use Request::*;
    let store = &mut Store::default();
    let value = |text: &str| Reply::Value(b(text));
    for (request, reply) in [
        (Ping(77), Reply::Nonce(77)),
        (Get(b("a")), value("")),
        (Check(vec![b("a")]), Reply::Byte(1)),
        (Add(b("n"), 5), Reply::Number(5)),
        (Add(b("n"), -7), Reply::Number(-2)),
        (Get(b("n")), value("-2")),
        (CompareSet(b("c"), b("x"), b("y")), value("x")),
        (CountKeys, Reply::Number(1)),
        (CompareSet(b("c"), b(""), b("y")), value("y")),
        (CompareSet(b("c"), b("z"), b("w")), value("y")),
        (CompareSet(b("c"), b("y"), b("w")), value("w")),
        (GetMany(vec![b("c"), b("none"), b("n")]), Reply::Values(vec![b("w"), b(""), b("-2")])),
        (ListKeys, Reply::Keys(vec![b("c"), b("n")])),
        (Delete(b("c")), Reply::Number(1)),
        (Delete(b("c")), Reply::Number(0)),
        (CancelWait, Reply::Byte(1)),
        (Wait(vec![b("n"), b("n")]), Reply::Byte(0)),
        (Wait(vec![]), Reply::Byte(0)),
        (Pop(b("q")), Reply::Number(0)),
        (QueueLength(b("q")), Reply::Number(0)),
        (Barrier(b("bar"), 1), Reply::Byte(0)),
        (Barrier(b("bar"), 1), Reply::Byte(0)),
    ] {
        assert_eq!(one(store, request.clone()), reply, "{request:?}");
    }
    for silent in [Validate, Set(b("s"), b("1")), Append(b("s"), b("2")), SetMany(vec![(b("t"), b("3"))])] {
        assert_eq!(ask(store, 1, silent), []);
    }
    assert_eq!(one(store, GetMany(vec![b("s"), b("t")])), Reply::Values(vec![b("12"), b("3")]));
    for item in ["1", "2"] {
        ask(store, 1, Push(b("q"), b(item)));
    }
    assert_eq!(one(store, QueueLength(b("q"))), Reply::Number(2));
    assert_eq!(one(store, Check(vec![b("q")])), Reply::Byte(0));
    assert_eq!(one(store, Delete(b("q"))), Reply::Number(0), "queues are not deleted");
    assert_eq!(one(store, Pop(b("q"))), Reply::Popped(2, b("1")));
    assert_eq!(one(store, Pop(b("q"))), Reply::Popped(1, b("2")));
}

#[test]
fn a_waiting_client_is_woken_once() {
    let store = &mut Store::default();
    assert_eq!(ask(store, 1, Request::Wait(vec![b("a"), b("c")])), []);
    assert_eq!(ask(store, 2, Request::Wait(vec![b("c")])), []);
    assert_eq!(ask(store, 3, Request::Set(b("a"), b(""))), []);
    assert_eq!(ask(store, 3, Request::Set(b("c"), b(""))), [(1, Reply::Byte(0)), (2, Reply::Byte(0))]);
    assert_eq!(ask(store, 3, Request::Set(b("c"), b(""))), []);
    // A client that cancelled or left is never woken.
    assert_eq!(ask(store, 1, Request::Wait(vec![b("x")])), []);
    assert_eq!(ask(store, 2, Request::Wait(vec![b("x")])), []);
    assert_eq!(ask(store, 1, Request::CancelWait), [(1, Reply::Byte(1))]);
    store.remove_client(2);
    assert_eq!(ask(store, 3, Request::Add(b("x"), 1)), [(3, Reply::Number(1))]);
    assert!(store.waiters.is_empty() && store.waiting.is_empty());
}

#[test]
fn one_item_wakes_one_client() {
    let store = &mut Store::default();
    for client in [1, 2] {
        assert_eq!(ask(store, client, Request::Wait(vec![b("q")])), []);
    }
    assert_eq!(ask(store, 3, Request::Push(b("q"), b("i"))), [(1, Reply::Byte(0))]);
    assert_eq!(ask(store, 3, Request::Push(b("q"), b("j"))), [(2, Reply::Byte(0))]);
}

#[test]
fn a_barrier_opens_for_all_at_once_and_stays_open() {
    let store = &mut Store::default();
    for client in [1, 2] {
        assert_eq!(ask(store, client, Request::Barrier(b("b"), 3)), []);
    }
    let woken = ask(store, 3, Request::Barrier(b("b"), 3));
    assert_eq!(woken, [1, 2, 3].map(|client| (client, Reply::Byte(0))));
    assert_eq!(ask(store, 4, Request::Barrier(b("b"), 3)), [(4, Reply::Byte(0))]);
    assert!(store.arrived.is_empty() && store.waiting.is_empty());
}

#[test]
fn an_invalid_request_is_rejected_and_changes_nothing() {
    let store = &mut Store::default();
    ask(store, 1, Request::Set(b("t"), b("text")));
    ask(store, 1, Request::Set(b("m"), b(&i64::MAX.to_string())));
    let large = vec![0; MAX_VALUE as usize];
    ask(store, 1, Request::Set(b("l"), large.clone()));
    ask(store, 1, Request::Wait(vec![b("never")]));
    for (request, expected) in [
        (Request::Add(b("t"), 1), ClientError::InvalidSum),
        (Request::Add(b("m"), 1), ClientError::InvalidSum),
        (Request::Append(b("l"), b("x")), ClientError::ValueTooLong),
        (Request::GetMany(vec![b("l"); 9]), ClientError::ReplyTooLong(9 * (8 + MAX_VALUE as usize))),
        (Request::Wait(vec![b("other")]), ClientError::SecondWait),
        (Request::Barrier(b("b"), 2), ClientError::SecondWait),
    ] {
        let before = store.bytes();
        assert_eq!(store.handle(1, request, &mut Vec::new()), Err(expected));
        assert_eq!(store.bytes(), before);
    }
    store.bytes = MAX_TOTAL - 10;
    for request in [Request::Push(b("q"), b("")), Request::Wait(vec![b("k")]), Request::Barrier(b("b"), 2)] {
        assert_eq!(store.handle(2, request, &mut Vec::new()), Err(ClientError::StoreFull));
    }
}

/// A simple store without waits, to compare with.
#[derive(Default)]
struct Model {
    values: BTreeMap<Key, Value>,
    queues: BTreeMap<Key, Vec<Value>>,
}

impl Model {
    /// Executes a request. Returns the reply to the client, or `None` if it has no immediate reply.
    fn ask(&mut self, request: &Request) -> Option<Reply> {
        let value = |model: &Model, k: &Key| model.values.get(k).cloned().unwrap_or_default();
        let has = |model: &Model, k: &Key| {
            model.values.contains_key(k) || model.queues.get(k).is_some_and(|q| !q.is_empty())
        };
        match request {
            Request::Validate => return None,
            Request::Set(k, v) => _ = self.values.insert(k.clone(), v.clone()),
            Request::SetMany(pairs) => self.values.extend(pairs.iter().cloned()),
            Request::Append(k, v) => self.values.entry(k.clone()).or_default().extend(v),
            Request::Push(k, v) => self.queues.entry(k.clone()).or_default().push(v.clone()),
            Request::CompareSet(k, old, new) => {
                let now = self.values.get(k).cloned();
                if now.as_ref().map_or(old.is_empty(), |now| now == old) {
                    self.values.insert(k.clone(), new.clone());
                    return Some(Reply::Value(new.clone()));
                }
                return Some(Reply::Value(now.unwrap_or(old.clone())));
            }
            Request::Get(k) => return Some(Reply::Value(value(self, k))),
            Request::GetMany(keys) => {
                return Some(Reply::Values(keys.iter().map(|k| value(self, k)).collect()));
            }
            Request::Add(k, n) | Request::Barrier(k, n) => {
                let step = if matches!(request, Request::Add(..)) { *n } else { 1 };
                let text = self.values.get(k).map_or("0".into(), |v| String::from_utf8(v.clone()).unwrap());
                let sum = text.parse::<i64>().unwrap() + step;
                self.values.insert(k.clone(), b(&sum.to_string()));
                return match request {
                    Request::Add(..) => Some(Reply::Number(sum)),
                    _ => (sum >= *n).then_some(Reply::Byte(0)),
                };
            }
            Request::Check(keys) => {
                return Some(Reply::Byte(u8::from(!keys.iter().all(|k| has(self, k)))));
            }
            Request::Wait(keys) => return keys.iter().all(|k| has(self, k)).then_some(Reply::Byte(0)),
            Request::CountKeys => {
                let queues = self.queues.values().filter(|q| !q.is_empty()).count();
                return Some(Reply::Number((self.values.len() + queues) as i64));
            }
            Request::ListKeys => return Some(Reply::Keys(self.values.keys().cloned().collect())),
            Request::Delete(k) => return Some(Reply::Number(self.values.remove(k).is_some().into())),
            Request::CancelWait => return Some(Reply::Byte(1)),
            Request::Ping(nonce) => return Some(Reply::Nonce(*nonce)),
            Request::QueueLength(k) => {
                return Some(Reply::Number(self.queues.get(k).map_or(0, Vec::len) as i64));
            }
            Request::Pop(k) => {
                let queue = self.queues.entry(k.clone()).or_default();
                return Some(match queue.len() {
                    0 => Reply::Number(0),
                    n => Reply::Popped(n as i64, queue.remove(0)),
                });
            }
        }
        None
    }
}

proptest! {
    /// Any requests in any order get the replies of the model, and all bytes are accounted for.
    #[test]
    fn any_requests_are_answered_like_by_the_model(requests in proptest::collection::vec((0u64..4, any_request()), 0..60)) {
        let mut store = Store::default();
        let mut model = Model::default();
        let mut open = std::collections::BTreeMap::new();
        for (client, request) in requests {
            let waits = matches!(request, Request::Wait(_) | Request::Barrier(..));
            let mut out = Vec::new();
            if store.waiting.contains_key(&client) && waits {
                prop_assert!(store.handle(client, request, &mut out).is_err());
                continue;
            }
            let number = |k: &Key| store.values.get(k).is_none_or(|v| std::str::from_utf8(v).unwrap().parse::<i64>().is_ok());
            if let Request::Add(k, _) | Request::Barrier(k, _) = &request && !number(k) {
                prop_assert!(store.handle(client, request, &mut out).is_err());
                continue;
            }
            prop_assert!(store.handle(client, request.clone(), &mut out).is_ok());
            let woken: Vec<Client> = out.iter().filter(|(c, _)| *c != client).map(|(c, _)| *c).collect();
            let replies: Vec<&Reply> = out.iter().filter(|(c, _)| *c == client).map(|(_, r)| r).collect();
            let expected = model.ask(&request);
            if waits && expected.is_none() {
                open.insert(client, request.clone());
            }
            for client in woken {
                prop_assert!(open.remove(&client).is_some(), "woken without waiting");
            }
            if let Some(reply) = expected {
                prop_assert_eq!(replies.last(), Some(&&reply), "{:?}", request);
            }
            if request == Request::CancelWait {
                open.remove(&client);
            } else if !waits && replies.len() > usize::from(model_answers(&request)) {
                prop_assert!(open.remove(&client).is_some(), "the wait of the client itself ended");
            }
            prop_assert_eq!(store.waiting.len(), open.len());
        }
        let values: usize = store.values.iter().map(|(k, v)| entry_bytes(k, v)).sum();
        let queues: usize = store.queues.iter().flat_map(|(k, q)| q.iter().map(|v| entry_bytes(k, v))).sum();
        let mut waits = 0;
        for waiting in store.waiting.values() {
            waits += match waiting {
                Waiting::Keys(keys, missing) => {
                    prop_assert_eq!(*missing, keys.iter().filter(|key| !store.contains_key(key)).count());
                    cost_of_wait(keys)
                }
                Waiting::Barrier(key) => cost_of_wait(std::slice::from_ref(key)),
            };
        }
        prop_assert_eq!(store.bytes(), values + queues + waits);
        for client in 0..4 {
            store.remove_client(client);
        }
        prop_assert!(store.waiting.is_empty() && store.waiters.is_empty() && store.arrived.is_empty());
    }
}

/// Whether the request itself has a reply, in addition to those of waits that it ends.
fn model_answers(request: &Request) -> bool {
    !matches!(
        request,
        Request::Validate | Request::Set(..) | Request::SetMany(_) | Request::Append(..) | Request::Push(..)
    )
}
