// A js-libp2p node that does what its standard input says: one JSON array a line, answered by one.
// `swarm_dht.mjs` is the configuration in docs/protocol/kademlia.md.

import { createInterface } from 'node:readline'
import { peerIdFromString } from '@libp2p/peer-id'
import { multiaddr } from '@multiformats/multiaddr'
import { CID } from 'multiformats/cid'
import * as Digest from 'multiformats/hashes/digest'
import { swarmNode } from './swarm_dht.mjs'

const DEADLINE_MS = 15_000
const RAW = 0x55
const RUNNING = { path: { index: -1, queued: 0, running: 0, total: 0 } }

const bytes = hex => Uint8Array.from(Buffer.from(hex, 'hex'))
const hex = data => Buffer.from(data).toString('hex')
const key = text => new TextEncoder().encode(text)
const deadline = () => ({ signal: AbortSignal.timeout(DEADLINE_MS) })
const cid = multihash => CID.createV1(RAW, Digest.decode(bytes(multihash)))

const clientMode = process.argv[2] === 'client'
const listen = clientMode ? [] : ['/ip4/127.0.0.1/tcp/0']
const node = await swarmNode({ clientMode, listen, local: true })
const dht = node.services.dht

const commands = {
  id: () => node.peerId.toString(),
  addresses: () => node.getMultiaddrs().map(String),
  async join (address) {
    const added = new Promise(resolve =>
      dht.routingTable.addEventListener('peer:add', resolve, { once: true }))
    await node.dial(multiaddr(address), deadline())
    await added
    return dht.routingTable.size
  },
  async find_peer (id) {
    const found = await node.peerRouting.findPeer(peerIdFromString(id), deadline())
    return found.multiaddrs.map(String)
  },
  // What this node itself holds and would serve.
  stored: async name => hex((await dht.contentFetching.getLocal(key(name))).value),
  // Whether its validator takes a value, and which of several its selector takes.
  async valid (name, value) {
    try {
      await dht.validators[name.split('/')[1]](key(name), bytes(value))
    } catch (error) {
      return error.message
    }
    return true
  },
  best: (name, ...values) => dht.selectors[name.split('/')[1]](key(name), values.map(bytes)),
  get: async name => hex(await node.contentRouting.get(key(name), deadline())),
  async put (name, value) {
    const answers = []
    for await (const event of dht.put(key(name), bytes(value), deadline())) {
      if (event.name === 'QUERY_ERROR') throw event.error
      if (event.name === 'PEER_RESPONSE' && event.messageName === 'PUT_VALUE') {
        answers.push(event.from.toString())
      }
    }
    return answers
  },
  async provide (multihash) {
    await node.contentRouting.provide(cid(multihash), deadline())
    return true
  },
  async find_providers (multihash) {
    const found = {}
    for await (const provider of node.contentRouting.findProviders(cid(multihash), deadline())) {
      found[provider.id.toString()] = provider.multiaddrs.map(String)
    }
    return found
  },
  async ping (id) {
    // kad-dht's own PING; /ipfs/ping is what `join` waits for.
    for await (const event of dht.network.sendRequest(
      peerIdFromString(id), { type: 'PING' }, { ...deadline(), ...RUNNING }
    )) {
      if (event.name === 'QUERY_ERROR') throw event.error
    }
    return true
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const [command, ...parameters] = JSON.parse(line)
  let answer
  try {
    answer = { answer: await commands[command](...parameters) }
  } catch (error) {
    answer = { error: `${command}: ${error.name}: ${error.message}` }
  }
  process.stdout.write(JSON.stringify(answer) + '\n')
}
await node.stop()
