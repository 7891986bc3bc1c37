//! [`Store`]: the keys, queues and waits of the rendezvous store, without I/O and clock.
//!
//! The store has no timeouts: a client that waited too long cancels its wait.
use super::{
    ClientError,
    wire::{Key, MAX_MESSAGE, MAX_VALUE, Reply, Request, Value},
};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// The number of a connection.
pub(super) type Client = u64;
/// Limit of the bytes of all keys, values, queues and waits together, including [`ENTRY`] for each.
pub(super) const MAX_TOTAL: usize = 1 << 30;
/// Bytes that are charged for each entry, and for each key that a client waits for, in addition to
/// the bytes of keys and values.
const ENTRY: usize = 128;
/// Reply to CHECK, and to a WAIT or BARRIER that ends.
const READY: u8 = 0;
/// Reply to CHECK if a key is missing.
const NOT_READY: u8 = 1;
/// Reply to CANCEL_WAIT.
const CANCELED: u8 = 1;

/// Replies, in the order in which they must be sent.
pub(super) type Replies = Vec<(Client, Reply)>;

/// What a client waits for.
#[derive(Debug)]
enum Waiting {
    /// All of these keys; the number is that of the missing keys.
    Keys(Vec<Key>, usize),
    /// Other clients at this barrier.
    Barrier(Key),
}

/// The state of the store.
#[derive(Debug, Default)]
pub(super) struct Store {
    values: BTreeMap<Key, Value>,
    /// No queue is empty.
    queues: HashMap<Key, VecDeque<Value>>,
    waiting: HashMap<Client, Waiting>,
    /// The clients that wait for each key, in the order of their requests.
    waiters: HashMap<Key, Vec<Client>>,
    /// The clients that wait at each barrier.
    arrived: HashMap<Key, Vec<Client>>,
    bytes: usize,
}

impl Store {
    /// Bytes of all keys, values, queues and waits.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Executes a request and appends the replies to `out`. After an error the client's connection
    /// must be closed.
    pub(super) fn handle(
        &mut self,
        client: Client,
        request: Request,
        out: &mut Replies,
    ) -> Result<(), ClientError> {
        let mut answer = |reply| out.push((client, reply));
        match request {
            Request::Validate => {}
            Request::Ping(nonce) => answer(Reply::Nonce(nonce)),
            Request::Get(key) => answer(Reply::Value(self.value(&key))),
            Request::GetMany(keys) => answer(Reply::Values(self.values(&keys)?)),
            Request::Check(keys) => {
                let ready = keys.iter().all(|key| self.contains_key(key));
                answer(Reply::Byte(if ready { READY } else { NOT_READY }));
            }
            Request::CountKeys => answer(Reply::Number((self.values.len() + self.queues.len()) as i64)),
            Request::ListKeys => answer(Reply::Keys(self.list_keys()?)),
            Request::Delete(key) => answer(Reply::Number(self.delete(&key))),
            Request::QueueLength(key) => answer(Reply::Number(self.queues.get(&key).map_or(0, len))),
            Request::Pop(key) => answer(self.pop(&key)),
            Request::CancelWait => {
                self.remove_client(client);
                answer(Reply::Byte(CANCELED));
            }
            Request::Set(key, value) => self.set(key, value, out)?,
            Request::SetMany(pairs) => {
                pairs.into_iter().try_for_each(|(key, value)| self.set(key, value, out))?
            }
            Request::Append(key, more) => {
                let value = [self.value(&key), more].concat();
                self.set(key, value, out)?;
            }
            Request::Add(key, n) => {
                let sum = self.add(key, n, out)?;
                out.push((client, Reply::Number(sum)));
            }
            Request::CompareSet(key, expected, new) => {
                let reply = self.compare_set(key, expected, new, out)?;
                out.push((client, Reply::Value(reply)));
            }
            Request::Push(key, value) => self.push(key, value, out)?,
            Request::Wait(keys) => self.wait(client, keys, out)?,
            Request::Barrier(key, world) => self.barrier(client, key, world, out)?,
        }
        Ok(())
    }

    /// Ends the wait of a client, if it has one, because the client cancelled it or disconnected.
    pub(super) fn remove_client(&mut self, client: Client) {
        let (map, keys) = match self.waiting.remove(&client) {
            None => return,
            Some(Waiting::Keys(keys, _)) => (&mut self.waiters, keys),
            Some(Waiting::Barrier(key)) => (&mut self.arrived, vec![key]),
        };
        self.bytes -= cost_of_wait(&keys);
        for key in keys {
            if let Some(clients) = map.get_mut(&key) {
                clients.retain(|c| *c != client);
                if clients.is_empty() {
                    map.remove(&key);
                }
            }
        }
    }

    // ---- values ----

    fn contains_key(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    /// The value of a key; empty when there is none.
    fn value(&self, key: &[u8]) -> Value {
        self.values.get(key).cloned().unwrap_or_default()
    }

    fn values(&self, keys: &[Key]) -> Result<Vec<Value>, ClientError> {
        let length = |key: &Key| 8 + self.values.get(key).map_or(0, Vec::len);
        check_reply_length(keys.iter().map(length).sum())?;
        Ok(keys.iter().map(|key| self.value(key)).collect())
    }

    fn list_keys(&self) -> Result<Vec<Key>, ClientError> {
        check_reply_length(self.values.keys().map(|key| 8 + key.len()).sum())?;
        Ok(self.values.keys().cloned().collect())
    }

    fn set(&mut self, key: Key, value: Value, out: &mut Replies) -> Result<(), ClientError> {
        if value.len() as u64 > MAX_VALUE {
            return Err(ClientError::ValueTooLong);
        }
        let before = self.values.get(&key).map_or(0, |old| entry_bytes(&key, old));
        self.account(before, entry_bytes(&key, &value))?;
        // The items of a queue may have woken only some of the clients that wait for it.
        let (new, queue) = (!self.contains_key(&key), self.queues.contains_key(&key));
        self.values.insert(key.clone(), value);
        if new {
            self.key_appeared(&key);
        } else if !queue {
            return Ok(());
        }
        // Removed first, because thousands of clients may wait for one key.
        let waiters = self.waiters.remove(&key).unwrap_or_default();
        let waiting: Vec<Client> = waiters.into_iter().filter(|c| !self.wake_if_ready(*c, out)).collect();
        if !waiting.is_empty() {
            self.waiters.insert(key, waiting);
        }
        Ok(())
    }

    /// Decrements the number of missing keys of each client that waits for a new key. The cost per
    /// client does not depend on the number of keys that the client waits for.
    fn key_appeared(&mut self, key: &[u8]) {
        for client in self.waiters.get(key).into_iter().flatten() {
            if let Some(Waiting::Keys(_, missing)) = self.waiting.get_mut(client) {
                *missing -= 1;
            }
        }
    }

    /// Increments the number of missing keys of each client that waits for a removed key.
    fn key_removed(&mut self, key: &[u8]) {
        for client in self.waiters.get(key).into_iter().flatten() {
            if let Some(Waiting::Keys(_, missing)) = self.waiting.get_mut(client) {
                *missing += 1;
            }
        }
    }

    /// Replaces `before` by `after` in the number of bytes in use. Fails if the result exceeds
    /// [`MAX_TOTAL`].
    fn account(&mut self, before: usize, after: usize) -> Result<(), ClientError> {
        let bytes = self.bytes - before + after;
        if bytes > MAX_TOTAL {
            return Err(ClientError::StoreFull);
        }
        self.bytes = bytes;
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> i64 {
        let Some(value) = self.values.remove(key) else { return 0 };
        self.bytes -= entry_bytes(key, &value);
        if !self.contains_key(key) {
            self.key_removed(key);
        }
        1
    }

    fn add(&mut self, key: Key, n: i64, out: &mut Replies) -> Result<i64, ClientError> {
        let number = match self.values.get(&key) {
            None => Some(0),
            Some(value) => std::str::from_utf8(value).ok().and_then(|text| text.trim().parse::<i64>().ok()),
        };
        let sum = number.and_then(|number| number.checked_add(n));
        let sum = sum.ok_or(ClientError::InvalidSum)?;
        self.set(key, sum.to_string().into_bytes(), out)?;
        Ok(sum)
    }

    fn compare_set(
        &mut self,
        key: Key,
        expected: Value,
        new: Value,
        out: &mut Replies,
    ) -> Result<Value, ClientError> {
        match self.values.get(&key) {
            None if !expected.is_empty() => return Ok(expected),
            Some(value) if *value != expected => return Ok(value.clone()),
            _ => {}
        }
        self.set(key, new.clone(), out)?;
        Ok(new)
    }

    // ---- queues ----

    fn push(&mut self, key: Key, value: Value, out: &mut Replies) -> Result<(), ClientError> {
        self.account(0, entry_bytes(&key, &value))?;
        let new = !self.contains_key(&key);
        self.queues.entry(key.clone()).or_default().push_back(value);
        if new {
            self.key_appeared(&key);
        }
        // An item wakes one client: a second one would find the queue empty.
        for client in self.waiters.get(&key).cloned().unwrap_or_default() {
            if self.wake_if_ready(client, out) {
                break;
            }
        }
        Ok(())
    }

    fn pop(&mut self, key: &[u8]) -> Reply {
        let Some(queue) = self.queues.get_mut(key) else { return Reply::Number(0) };
        let length = len(queue);
        let value = queue.pop_front().unwrap_or_default();
        let empty = queue.is_empty();
        self.bytes -= entry_bytes(key, &value);
        if empty {
            self.queues.remove(key);
            if !self.contains_key(key) {
                self.key_removed(key);
            }
        }
        Reply::Popped(length, value)
    }

    // ---- waiting ----

    fn wait(&mut self, client: Client, mut keys: Vec<Key>, out: &mut Replies) -> Result<(), ClientError> {
        self.check_not_waiting(client)?;
        keys.sort_unstable();
        keys.dedup();
        let missing = keys.iter().filter(|key| !self.contains_key(key)).count();
        if missing == 0 {
            out.push((client, Reply::Byte(READY)));
            return Ok(());
        }
        self.account(0, cost_of_wait(&keys))?;
        for key in &keys {
            self.waiters.entry(key.clone()).or_default().push(client);
        }
        self.waiting.insert(client, Waiting::Keys(keys, missing));
        Ok(())
    }

    fn check_not_waiting(&self, client: Client) -> Result<(), ClientError> {
        match self.waiting.contains_key(&client) {
            true => Err(ClientError::SecondWait),
            false => Ok(()),
        }
    }

    /// Ends a client's wait for keys if no key is missing. Returns whether the wait ended.
    fn wake_if_ready(&mut self, client: Client, out: &mut Replies) -> bool {
        let ready = matches!(self.waiting.get(&client), Some(Waiting::Keys(_, 0)));
        if ready {
            self.remove_client(client);
            out.push((client, Reply::Byte(READY)));
        }
        ready
    }

    /// Counts a client's arrival at a barrier. The arrival that makes the count reach `world` wakes
    /// all waiting clients; later arrivals do not wait.
    fn barrier(
        &mut self,
        client: Client,
        key: Key,
        world: i64,
        out: &mut Replies,
    ) -> Result<(), ClientError> {
        self.check_not_waiting(client)?;
        let count = self.add(key.clone(), 1, out)?;
        if count < world {
            self.account(0, cost_of_wait(std::slice::from_ref(&key)))?;
            self.arrived.entry(key.clone()).or_default().push(client);
            self.waiting.insert(client, Waiting::Barrier(key));
            return Ok(());
        }
        for waiter in self.arrived.remove(&key).unwrap_or_default() {
            self.waiting.remove(&waiter);
            self.bytes -= cost_of_wait(std::slice::from_ref(&key));
            out.push((waiter, Reply::Byte(READY)));
        }
        out.push((client, Reply::Byte(READY)));
        Ok(())
    }
}

fn entry_bytes(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY
}

/// Returns the bytes that are charged for a wait. Each key is stored twice: by client and by key.
fn cost_of_wait(keys: &[Key]) -> usize {
    keys.iter().map(|key| 2 * key.len() + ENTRY).sum()
}

fn len(queue: &VecDeque<Value>) -> i64 {
    queue.len() as i64
}

fn check_reply_length(bytes: usize) -> Result<(), ClientError> {
    match bytes > MAX_MESSAGE {
        true => Err(ClientError::ReplyTooLong(bytes)),
        false => Ok(()),
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
