//! Defines [`RendezvousStore`], the state of launch's server for torch's `TCPStore`: keys, values,
//! queues and waiting clients, but no sockets.
//!
//! The store has no timeouts: a client that has waited too long cancels its wait.
use super::{
    StoreClientError,
    limits::{MAX_MESSAGE_BYTES, MAX_STORE_BYTES, MAX_VALUE_BYTES},
    wire::{StoreKey, StoreReply, StoreRequest, StoreValue},
};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// The number that identifies the connection of a client of the rendezvous store.
pub(super) type ClientId = u64;
/// The number of bytes that is added to the size of the rendezvous store for each value, queue item
/// and awaited key, in addition to its text.
const ENTRY_OVERHEAD_BYTES: usize = 128;
/// The reply of the rendezvous store to a client's CHECK request if all keys exist, and to a WAIT
/// or BARRIER request when the client's wait ends.
const READY_REPLY: u8 = 0;
/// The reply of the store to a CHECK request if any of the keys does not exist.
const NOT_READY_REPLY: u8 = 1;
/// The reply of the store to a CANCEL_WAIT request, by which a client ends its WAIT.
const CANCELED_REPLY: u8 = 1;

/// Replies of the rendezvous store, each with the number of the client that receives it, in the
/// order in which they must be sent.
pub(super) type ClientReplies = Vec<(ClientId, StoreReply)>;

/// What a client of the rendezvous store waits for: that keys exist, or that other clients arrive
/// at a barrier.
#[derive(Debug)]
enum ClientWait {
    /// The client waits for all of these keys. The number counts the keys that are missing.
    Keys(Vec<StoreKey>, usize),
    /// The client waits for other clients at the barrier that this key names.
    Barrier(StoreKey),
}

/// The state of the rendezvous store, launch's server for torch's `TCPStore` clients: the values,
/// the queues, and the clients that wait.
#[derive(Debug, Default)]
pub(super) struct RendezvousStore {
    values: BTreeMap<StoreKey, StoreValue>,
    /// Maps each key with a queue to the items of the queue. No queue is empty.
    queues: HashMap<StoreKey, VecDeque<StoreValue>>,
    waiting: HashMap<ClientId, ClientWait>,
    /// Maps each key to the clients that wait for the key, in the order of their requests.
    waiters: HashMap<StoreKey, Vec<ClientId>>,
    /// Maps the key of each barrier to the clients that wait at the barrier.
    arrived: HashMap<StoreKey, Vec<ClientId>>,
    /// The number of bytes of all keys, values, queues and waits, which [`MAX_STORE_BYTES`] limits.
    bytes: usize,
}

impl RendezvousStore {
    /// Returns the total size in bytes of the keys, values, queues and waits in the rendezvous
    /// store. [`MAX_STORE_BYTES`] limits this number.
    pub(super) fn total_bytes(&self) -> usize {
        self.bytes
    }

    /// Executes a client's request to the rendezvous store, and appends the replies that the
    /// request causes, to this client and others, to `out`. After an error the caller must close
    /// the client's connection.
    pub(super) fn handle_request(
        &mut self,
        client: ClientId,
        request: StoreRequest,
        out: &mut ClientReplies,
    ) -> Result<(), StoreClientError> {
        let mut answer = |reply| out.push((client, reply));
        match request {
            StoreRequest::Validate => {}
            StoreRequest::Ping(nonce) => answer(StoreReply::Nonce(nonce)),
            StoreRequest::Get(key) => answer(StoreReply::Value(self.get_value(&key))),
            StoreRequest::GetMany(keys) => answer(StoreReply::Values(self.get_values(&keys)?)),
            StoreRequest::Check(keys) => {
                let ready = keys.iter().all(|key| self.contains_key(key));
                answer(StoreReply::Byte(if ready { READY_REPLY } else { NOT_READY_REPLY }));
            }
            StoreRequest::CountKeys => {
                answer(StoreReply::Number((self.values.len() + self.queues.len()) as i64))
            }
            StoreRequest::ListKeys => answer(StoreReply::Keys(self.list_keys()?)),
            StoreRequest::Delete(key) => answer(StoreReply::Number(self.delete_key(&key))),
            StoreRequest::QueueLength(key) => {
                answer(StoreReply::Number(self.queues.get(&key).map_or(0, queue_length_to_number)))
            }
            StoreRequest::Pop(key) => answer(self.pop_item(&key)),
            StoreRequest::CancelWait => {
                self.end_wait(client);
                answer(StoreReply::Byte(CANCELED_REPLY));
            }
            StoreRequest::Set(key, value) => self.set_value(key, value, out)?,
            StoreRequest::SetMany(pairs) => {
                pairs.into_iter().try_for_each(|(key, value)| self.set_value(key, value, out))?
            }
            StoreRequest::Append(key, more) => {
                let value = [self.get_value(&key), more].concat();
                self.set_value(key, value, out)?;
            }
            StoreRequest::Add(key, n) => {
                let sum = self.add_number(key, n, out)?;
                out.push((client, StoreReply::Number(sum)));
            }
            StoreRequest::CompareSet(key, expected, new) => {
                let reply = self.compare_set(key, expected, new, out)?;
                out.push((client, StoreReply::Value(reply)));
            }
            StoreRequest::Push(key, value) => self.push_item(key, value, out)?,
            StoreRequest::Wait(keys) => self.begin_wait(client, keys, out)?,
            StoreRequest::Barrier(key, world) => self.enter_barrier(client, key, world, out)?,
        }
        Ok(())
    }

    /// Removes a client of the rendezvous store from the clients that wait for keys or at a
    /// barrier, after its wait was canceled or has ended. Does nothing if the client does not wait.
    pub(super) fn end_wait(&mut self, client: ClientId) {
        let (map, keys) = match self.waiting.remove(&client) {
            None => return,
            Some(ClientWait::Keys(keys, _)) => (&mut self.waiters, keys),
            Some(ClientWait::Barrier(key)) => (&mut self.arrived, vec![key]),
        };
        self.bytes -= compute_wait_bytes(&keys);
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

    /// Returns whether the store has a value, or at least one queue item, for a key.
    fn contains_key(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    /// Returns the value of a key of the store, or an empty value if the key has none.
    fn get_value(&self, key: &[u8]) -> StoreValue {
        self.values.get(key).cloned().unwrap_or_default()
    }

    /// Returns the values of several keys of the rendezvous store for one reply, and fails if this
    /// reply would be too long.
    fn get_values(&self, keys: &[StoreKey]) -> Result<Vec<StoreValue>, StoreClientError> {
        let length = |key: &StoreKey| 8 + self.values.get(key).map_or(0, Vec::len);
        check_reply_length(keys.iter().map(length).sum())?;
        Ok(keys.iter().map(|key| self.get_value(key)).collect())
    }

    /// Returns all keys of the store that have values. Fails if the reply would be too long.
    fn list_keys(&self) -> Result<Vec<StoreKey>, StoreClientError> {
        check_reply_length(self.values.keys().map(|key| 8 + key.len()).sum())?;
        Ok(self.values.keys().cloned().collect())
    }

    /// Sets the value of the store's key `key` to `value`. Wakes the clients for which no further
    /// key is missing, by appending their replies to `out`. Fails if the value or the store becomes
    /// too large.
    fn set_value(
        &mut self,
        key: StoreKey,
        value: StoreValue,
        out: &mut ClientReplies,
    ) -> Result<(), StoreClientError> {
        if value.len() as u64 > MAX_VALUE_BYTES {
            return Err(StoreClientError::ValueTooLong);
        }
        let before = self.values.get(&key).map_or(0, |old| compute_entry_bytes(&key, old));
        self.update_total_bytes(before, compute_entry_bytes(&key, &value))?;
        // The items of a queue may have woken only some of the clients that wait for it.
        let (new, queue) = (!self.contains_key(&key), self.queues.contains_key(&key));
        self.values.insert(key.clone(), value);
        if new {
            self.decrement_missing_keys_of_waits(&key);
        } else if !queue {
            return Ok(());
        }
        // The whole list is removed at once, because thousands of clients may wait for one key.
        let waiters = self.waiters.remove(&key).unwrap_or_default();
        let waiting: Vec<ClientId> = waiters.into_iter().filter(|c| !self.wake_if_ready(*c, out)).collect();
        if !waiting.is_empty() {
            self.waiters.insert(key, waiting);
        }
        Ok(())
    }

    /// Decrements the number of missing keys of each store client that waits for `key`, because
    /// this key now exists. The caller must just have added the key's first value or item, and must
    /// then wake clients whose number is 0. The cost per client does not depend on the number of
    /// keys that the client waits for.
    fn decrement_missing_keys_of_waits(&mut self, key: &[u8]) {
        for client in self.waiters.get(key).into_iter().flatten() {
            if let Some(ClientWait::Keys(_, missing)) = self.waiting.get_mut(client) {
                *missing -= 1;
            }
        }
    }

    /// Increments the number of missing keys of each store client that waits for `key`, because
    /// this key no longer exists. The caller must just have removed the key's last value or item.
    fn increment_missing_keys_of_waits(&mut self, key: &[u8]) {
        for client in self.waiters.get(key).into_iter().flatten() {
            if let Some(ClientWait::Keys(_, missing)) = self.waiting.get_mut(client) {
                *missing += 1;
            }
        }
    }

    /// Updates the total size of the rendezvous store, in bytes, for an entry whose size changes
    /// from `before` to `after` bytes. Fails, without a change, if the result exceeds
    /// [`MAX_STORE_BYTES`].
    fn update_total_bytes(&mut self, before: usize, after: usize) -> Result<(), StoreClientError> {
        let bytes = self.bytes - before + after;
        if bytes > MAX_STORE_BYTES {
            return Err(StoreClientError::StoreFull);
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Deletes the value of a key of the store, and keeps the queue of the key. Returns the number
    /// of deleted values: 0 or 1.
    fn delete_key(&mut self, key: &[u8]) -> i64 {
        let Some(value) = self.values.remove(key) else { return 0 };
        self.bytes -= compute_entry_bytes(key, &value);
        if !self.contains_key(key) {
            self.increment_missing_keys_of_waits(key);
        }
        1
    }

    /// Adds `n` to the decimal number in the value of a key of the store, and returns the sum. A
    /// key without a value counts as 0. Fails if the value is not a number or the sum overflows.
    fn add_number(
        &mut self,
        key: StoreKey,
        n: i64,
        out: &mut ClientReplies,
    ) -> Result<i64, StoreClientError> {
        let number = match self.values.get(&key) {
            None => Some(0),
            Some(value) => std::str::from_utf8(value).ok().and_then(|text| text.trim().parse::<i64>().ok()),
        };
        let sum = number.and_then(|number| number.checked_add(n));
        let sum = sum.ok_or(StoreClientError::InvalidSum)?;
        self.set_value(key, sum.to_string().into_bytes(), out)?;
        Ok(sum)
    }

    /// Sets a key of the store to `new` if its value equals `expected`, or if the key has no value
    /// and `expected` is empty. Returns the value of the key afterwards, or `expected` if the key
    /// has no value.
    fn compare_set(
        &mut self,
        key: StoreKey,
        expected: StoreValue,
        new: StoreValue,
        out: &mut ClientReplies,
    ) -> Result<StoreValue, StoreClientError> {
        match self.values.get(&key) {
            None if !expected.is_empty() => return Ok(expected),
            Some(value) if *value != expected => return Ok(value.clone()),
            _ => {}
        }
        self.set_value(key, new.clone(), out)?;
        Ok(new)
    }

    // ---- queues ----

    /// Appends an item to a queue of the store, and ends the wait of at most one client that waits
    /// for the queue. Fails if the store becomes too large.
    fn push_item(
        &mut self,
        key: StoreKey,
        value: StoreValue,
        out: &mut ClientReplies,
    ) -> Result<(), StoreClientError> {
        self.update_total_bytes(0, compute_entry_bytes(&key, &value))?;
        let new = !self.contains_key(&key);
        self.queues.entry(key.clone()).or_default().push_back(value);
        if new {
            self.decrement_missing_keys_of_waits(&key);
        }
        // An item wakes one client, because a second one would find the queue empty.
        for client in self.waiters.get(&key).cloned().unwrap_or_default() {
            if self.wake_if_ready(client, out) {
                break;
            }
        }
        Ok(())
    }

    /// Removes and returns the first item of the queue `key` of the store. Returns the reply, which
    /// holds the previous length of the queue and the item. The reply for an empty queue is 0.
    fn pop_item(&mut self, key: &[u8]) -> StoreReply {
        let Some(queue) = self.queues.get_mut(key) else { return StoreReply::Number(0) };
        let length = queue_length_to_number(queue);
        let value = queue.pop_front().unwrap_or_default();
        let empty = queue.is_empty();
        self.bytes -= compute_entry_bytes(key, &value);
        if empty {
            self.queues.remove(key);
            if !self.contains_key(key) {
                self.increment_missing_keys_of_waits(key);
            }
        }
        StoreReply::Popped(length, value)
    }

    // ---- waiting ----

    /// Makes a client of the store wait until other clients have set all of `keys`. If no key is
    /// missing, appends the reply to `out` immediately and begins no wait. Fails if the client
    /// waits already, or if the store is full.
    fn begin_wait(
        &mut self,
        client: ClientId,
        mut keys: Vec<StoreKey>,
        out: &mut ClientReplies,
    ) -> Result<(), StoreClientError> {
        self.check_not_waiting(client)?;
        keys.sort_unstable();
        keys.dedup();
        let missing = keys.iter().filter(|key| !self.contains_key(key)).count();
        if missing == 0 {
            out.push((client, StoreReply::Byte(READY_REPLY)));
            return Ok(());
        }
        self.update_total_bytes(0, compute_wait_bytes(&keys))?;
        for key in &keys {
            self.waiters.entry(key.clone()).or_default().push(client);
        }
        self.waiting.insert(client, ClientWait::Keys(keys, missing));
        Ok(())
    }

    /// Fails if the client of the store is already waiting, because a client can have only one wait
    /// at a time.
    fn check_not_waiting(&self, client: ClientId) -> Result<(), StoreClientError> {
        match self.waiting.contains_key(&client) {
            true => Err(StoreClientError::SecondWait),
            false => Ok(()),
        }
    }

    /// Ends a client's wait for keys of the rendezvous store if all of these keys exist now, and
    /// appends the reply to `out`. Returns whether the wait ended.
    fn wake_if_ready(&mut self, client: ClientId, out: &mut ClientReplies) -> bool {
        let ready = matches!(self.waiting.get(&client), Some(ClientWait::Keys(_, 0)));
        if ready {
            self.end_wait(client);
            out.push((client, StoreReply::Byte(READY_REPLY)));
        }
        ready
    }

    /// Records that a client of the store has arrived at the barrier with the key `key`, and wakes
    /// all waiting clients when the last one has arrived. The value of the key is the number of
    /// arrivals. The client waits until `world` clients have arrived. The last of them wakes the
    /// others, by appending all replies to `out`, and later arrivals do not wait. Fails if the
    /// client waits already, the value is not a number, or the store is full.
    fn enter_barrier(
        &mut self,
        client: ClientId,
        key: StoreKey,
        world: i64,
        out: &mut ClientReplies,
    ) -> Result<(), StoreClientError> {
        self.check_not_waiting(client)?;
        let count = self.add_number(key.clone(), 1, out)?;
        if count < world {
            self.update_total_bytes(0, compute_wait_bytes(std::slice::from_ref(&key)))?;
            self.arrived.entry(key.clone()).or_default().push(client);
            self.waiting.insert(client, ClientWait::Barrier(key));
            return Ok(());
        }
        for waiter in self.arrived.remove(&key).unwrap_or_default() {
            self.waiting.remove(&waiter);
            self.bytes -= compute_wait_bytes(std::slice::from_ref(&key));
            out.push((waiter, StoreReply::Byte(READY_REPLY)));
        }
        out.push((client, StoreReply::Byte(READY_REPLY)));
        Ok(())
    }
}

/// Returns the number of bytes by which a key with its value, or an item of a queue, increases the
/// size of the rendezvous store.
fn compute_entry_bytes(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY_OVERHEAD_BYTES
}

/// Returns the number of bytes by which a client that waits for the keys `keys` increases the size
/// of the rendezvous store. The store holds each key twice: by client and by key.
fn compute_wait_bytes(keys: &[StoreKey]) -> usize {
    keys.iter().map(|key| 2 * key.len() + ENTRY_OVERHEAD_BYTES).sum()
}

/// Converts the length of a queue to the signed number that replies of the store contain.
fn queue_length_to_number(queue: &VecDeque<StoreValue>) -> i64 {
    queue.len() as i64
}

/// Fails if a reply of the rendezvous store with `bytes` bytes would be longer than
/// [`MAX_MESSAGE_BYTES`].
fn check_reply_length(bytes: usize) -> Result<(), StoreClientError> {
    match bytes > MAX_MESSAGE_BYTES {
        true => Err(StoreClientError::ReplyTooLong(bytes)),
        false => Ok(()),
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
