// The server of @grpc/grpc-js that the interop module calls.
//
//   node server.js PROTO [OPTIONS]
//
// PROTO is the schema of the test server, OPTIONS a JSON object of grpc-js server options. It listens on a free port of the
// loopback interface and writes one JSON object a line: first {"port": N}, then {"attempt": S} for each call that its handlers
// process, S being the metadata grpc-previous-rpc-attempts. What a handler does is the JSON object in the request's text.
'use strict';

const fs = require('fs');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const protobuf = require('protobufjs');

const [proto, options] = process.argv.slice(2);
const { TestService } = grpc.loadPackageDefinition(loader.loadSync(proto)).testsrv.v1;

// Written at once, so that a line is out before the process can be killed.
const say = (object) => fs.writeSync(1, JSON.stringify(object) + '\n');

const { root } = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }
`, { keepCase: true });
const encode = (name, value) => root.lookupType(name).encode(value).finish();

function details(code, milliseconds) {
  const value = encode('RetryInfo', { retry_delay: { seconds: 0, nanos: milliseconds * 1e6 } });
  const any = { type_url: 'type.googleapis.com/google.rpc.RetryInfo', value };
  return Buffer.from(encode('Status', { code, message: 'no', details: [any] }));
}

let server;

function handle(call, callback) {
  say({ attempt: call.metadata.get('grpc-previous-rpc-attempts').join('+') });
  const act = JSON.parse(call.request.text || '{}');
  if (act.header) {
    const header = new grpc.Metadata();
    header.set('k', 'v');
    call.sendMetadata(header);
  }
  if (act.throw) throw new Error('thrown by the handler');
  if (act.shutdown === 'graceful') server.tryShutdown(() => {});
  if (act.shutdown === 'forced') return server.forceShutdown();
  if (act.exit) return process.kill(process.pid, 'SIGKILL');
  if (act.code) {
    const trailer = new grpc.Metadata();
    if (act.pushback !== undefined) trailer.set('grpc-retry-pushback-ms', act.pushback);
    if (act.retryInfo !== undefined) trailer.set('grpc-status-details-bin', details(act.code, act.retryInfo));
    return callback({ code: act.code, details: 'no', metadata: trailer });
  }
  setTimeout(() => callback(null, { text: 'node', payload: Buffer.alloc(act.reply || 0) }), act.delay || 0);
}

server = new grpc.Server(JSON.parse(options || '{}'));
// List and the other streams stay without a handler.
server.addService(TestService.service, { Put: handle, Write: handle });
server.bindAsync('127.0.0.1:0', grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  say({ port });
});
